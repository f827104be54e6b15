"""Train a Transformer language model on real text: a small loop with what a real run needs.

    python scripts/train.py                                       # on the Python library's sources; a laptop will do
    python scripts/train.py --data my.txt --size small --ctx 512 --precision bf16 --attention flash-triton
    python scripts/train.py --parallel ddp --sharded-optimizer    # one process a GPU, or two on a CPU
    python scripts/train.py --resume                              # after Ctrl-C, a kill or a crash

Under --out it leaves metrics.jsonl (one JSON object a line), train.png and checkpoints. Resumed runs go on as if they
had never stopped: on a CPU, with as many threads, the losses are the same bit for bit.
"""

from __future__ import annotations

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.training.config import TrainArguments, TrainConfig


def main() -> None:
    arguments = parse(TrainArguments, __doc__, may_be_infinite=("clip_norm",), on_ranks=True)
    with refusing_bad_input():
        config = TrainConfig(**vars(arguments))
    from cs336_systems.training.run import run_training

    run_training(command_line(), config)


if __name__ == "__main__":
    main()
