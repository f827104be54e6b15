"""The last that the tests' fork server imports: what there is by then, modules and their functions, is in no garbage
collection of the processes forked from it, of which each would take a tenth of a second."""

import gc

gc.collect()
gc.freeze()
