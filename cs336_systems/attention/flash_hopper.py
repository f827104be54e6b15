"""Attention on Hopper (compute capability 9.0): Gluon's kernels where they are faster, and the portable ones elsewhere.

Which problems are which is said, with the measurements, in `hopper_plan.py`; the kernels are `hopper_forward.py`,
`hopper_backward.py` and `hopper_dq.py`. All share the tensors, the launch plans and the results' meaning with
`flash_triton.py`.
"""

import functools

from cs336_systems.attention.flash_triton import flash_backward, flash_forward

hopper_forward = functools.partial(flash_forward, is_hopper=True)
hopper_backward = functools.partial(flash_backward, is_hopper=True)
