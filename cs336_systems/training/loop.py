"""The loop over steps, on each rank: what is validated, saved, shown and written down, and what ends a run."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cs336_systems.cli import tell
from cs336_systems.distributed.last_words import end_at_once
from cs336_systems.progress import WhileItCan
from cs336_systems.provenance import Provenance
from cs336_systems.signals import IN_SUCCESSION_S, STOPPED, answer, answer_requests
from cs336_systems.training.checkpoints import list_checkpoints, load_newest, save_checkpoint
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import TokenFile
from cs336_systems.training.metrics import METRICS, PLOT, MetricsFile
from cs336_systems.training.trainer import StepResult, Trainer

# The scale has by then been halved from 65536 to below 1e-4: no scale will do.
MOST_SKIPPED_IN_A_ROW = 30
NOTABLE_ZERO_SHARE = 0.05


@dataclass(frozen=True)
class Summary:
    """How a run ended: `status` is "finished", "interrupted" (`signal` says by what) or "stopped" (`reason` says why).
    Losses in nats a token; `checkpoint` is the last one written."""

    status: str
    reason: str
    step: int
    loss: float | None
    validation_loss: float | None
    skipped_steps: int
    checkpoint: str | None
    signal: int | None = None


def train_rank(
    context: Any,
    config: TrainConfig,
    tokens: TokenFile,
    device: str,
    provenance: Provenance,
    has_bar: bool = True,
) -> Summary:
    """Trains on one rank, to the end or until something stops it. Rank 0 alone writes and shows.

    Args:
        context: the rank's `RankContext`; None for a run in one process, which answers Ctrl-C, a request to end, or
            SIGINT of whoever started this process, by finishing its step and saving it. So do ranks that a launcher
            started, all after the same step, whichever of them hears it; ranks that this program spawned leave Ctrl-C
            to it.
        has_bar: rank 0 shows its steps by a progress bar.

    Raises:
        ValueError: the run resumes, and all its checkpoints are bad.
        OSError: metrics or a checkpoint could not be written.
    """
    is_main = context is None or context.rank == 0
    is_launched = context is not None and multiprocessing.parent_process() is None
    checkpoint, refused = load_newest(config.out) if config.resume else (None, [])
    if is_main and not config.resume:
        move_aside(config.out)
    start = checkpoint.step if checkpoint else 0
    torch_device = torch.device(device) if context is None else context.device
    trainer = Trainer(config, tokens, torch_device, checkpoint.state if checkpoint else None)
    path = config.out / METRICS if is_main else None
    with (
        MetricsFile(path, after_step=start if config.resume else None) as metrics,
        tqdm(
            total=config.steps, initial=start, unit="step", file=WhileItCan(), disable=not (is_main and has_bar)
        ) as bar,
        _answering(context is not None and not is_launched, is_launched, is_main) as interrupts,
    ):
        world_size = trainer.model.world_size
        log = _Log(metrics, bar, is_main)
        metrics.write("run", step=start, world_size=world_size, config=plain_config(config), **asdict(provenance))
        if config.resume and checkpoint is None and not refused:
            log.tell(start, f"no checkpoint under {config.out}; starting from the beginning")
        for reason in refused:
            log.tell(start, f"{reason}; going on from {checkpoint.path.name if checkpoint else 'the beginning'}")
        loop = _Loop(config, tokens, trainer, log, checkpoint.path if checkpoint else None, is_launched)
        return loop.run(start, interrupts)


class _Log:
    """Where a run says something: in its metrics and, past the progress bar, on the terminal."""

    def __init__(self, metrics: MetricsFile, bar: Any, is_told: bool) -> None:
        self.metrics, self.bar, self.is_told = metrics, bar, is_told

    def tell(self, step: int, message: str) -> None:
        self.metrics.write("event", step=step, message=message)
        if self.is_told:
            tqdm.write(f"step {step}: {message}", file=WhileItCan())


class _Loop:
    def __init__(
        self,
        config: TrainConfig,
        tokens: TokenFile,
        trainer: Trainer,
        log: _Log,
        checkpoint: Path | None,
        is_launched: bool,
    ) -> None:
        self.config, self.tokens, self.trainer, self.log = config, tokens, trainer, log
        self.checkpoint, self.is_launched = checkpoint, is_launched
        self.loss: float | None = None
        self.validation_loss: float | None = None

    def run(self, start: int, interrupts: _Interrupts) -> Summary:
        config, step = self.config, start
        for step in range(start + 1, config.steps + 1):
            is_validated = step % config.validate_every == 0 or step == config.steps
            result = self._timed_step(step, is_validated)
            reason = self._why_stop(step, result)
            if reason:
                self.log.metrics.write("event", step=step, message=reason)
                return self._summary("stopped", step, reason)
            if is_validated:
                self.validation_loss = self.trainer.validation_loss()
                self.log.metrics.write("validation", step=step, loss=self.validation_loss)
            is_saved = step % config.checkpoint_every == 0 or step == config.steps
            if is_saved:
                self._save(step)
            number = self._heard(interrupts) if step < config.steps else None
            if number is not None:
                if not is_saved:
                    self._save(step)
                self.log.metrics.write("event", step=step, message="interrupted")
                return self._summary("interrupted", step, number=number)
        return self._summary("finished", step)

    def _heard(self, interrupts: _Interrupts) -> int | None:
        """The signal that is to end the run, None if there is none: of launched ranks the same on all, whichever of
        them it was sent to. For these it is a collective call."""
        if not self.is_launched:
            return interrupts.numbers[0] if interrupts.numbers else None
        noted = torch.tensor([float(number in interrupts.numbers) for number in STOPPED], device=self.trainer.device)
        counts = self.trainer.model.sum_over_ranks(noted).tolist()
        heard = next((number for number, count in zip(STOPPED, counts, strict=True) if count), None)
        if heard is not None:
            interrupts.note(heard)
        return heard

    def _timed_step(self, step: int, is_validated: bool) -> StepResult:
        start_s = time.perf_counter()
        result = self.trainer.step(step, count_zeros=is_validated)
        seconds = time.perf_counter() - start_s
        tokens_per_s = self.config.batch_size * self.config.ctx / seconds
        self.loss = result.loss
        self.log.metrics.write("train", step=step, **asdict(result), step_ms=seconds * 1e3, tokens_per_s=tokens_per_s)
        shown = {"loss": f"{result.loss:.3f}", "tok/s": f"{tokens_per_s:,.0f}"}
        if self.validation_loss is not None:
            shown["val"] = f"{self.validation_loss:.3f}"
        if result.loss_scale is not None:
            shown |= {"scale": f"{result.loss_scale:g}", "skipped": str(result.skipped_steps)}
        self.log.bar.set_postfix(shown, refresh=False)
        self.log.bar.update()
        if result.is_skipped and math.isfinite(result.loss):
            self.log.tell(step, self._overflow(result))
        elif (result.zero_gradient_share or 0) > NOTABLE_ZERO_SHARE and self.config.precision == "fp16":
            share = f"{result.zero_gradient_share:.1%} of the gradients underflowed to zero in float16"
            self.log.tell(step, share if self.config.loss_scaling else f"{share}: there is no loss scaling")
        return result

    def _overflow(self, result: StepResult) -> str:
        scale = f"the loss scale goes from {result.loss_scale:g} to {self.trainer.scaler.scale:g}"
        then = scale if self.config.loss_scaling else "there is no loss scaling"
        return f"gradients overflowed float16, the step is skipped: {then}; {result.skipped_steps} skipped so far"

    def _why_stop(self, step: int, result: StepResult) -> str:
        """Empty for a step after which training can go on."""
        problem = ""
        if not math.isfinite(result.loss):
            problem = f"the loss is {result.loss} at step {step}"
            if self.config.precision == "fp16":
                problem += ": activations overflowed float16 in the forward pass, where loss scaling can't help"
        elif not result.is_skipped and not math.isfinite(result.gradient_norm):
            problem = f"the gradients' norm is {result.gradient_norm} at step {step}, with a loss of {result.loss:.4g}"
        elif self.trainer.scaler.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            problem = (
                f"gradients overflowed float16 in {MOST_SKIPPED_IN_A_ROW} steps in a row up to step {step}, the last "
                f"at a loss scale of {result.loss_scale:g}"
            )
        if not problem:
            return ""
        last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "there is no checkpoint yet"
        return f"{problem}; {last}"

    def _save(self, step: int) -> None:
        state = self.trainer.state()
        if state is not None:
            config = plain_config(self.config)
            self.checkpoint = save_checkpoint(
                self.config.out, step, state, config, self.tokens.sha256, self.config.keep_checkpoints
            )

    def _summary(self, status: str, step: int, reason: str = "", number: int | None = None) -> Summary:
        return Summary(
            status=status,
            reason=reason,
            step=step,
            loss=self.loss,
            validation_loss=self.validation_loss,
            skipped_steps=self.trainer.scaler.skipped_steps,
            checkpoint=str(self.checkpoint) if self.checkpoint else None,
            signal=number,
        )


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON holds it."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def move_aside(out: Path) -> None:
    """An earlier run's files go into a folder of their own, named by when it was last written to."""
    files = [path for path in (out / METRICS, out / PLOT) if path.exists()]
    for path in list_checkpoints(out):
        files += [path for path in (path, path.with_suffix(".json")) if path.exists()]
    if files:
        last = datetime.fromtimestamp(max(path.stat().st_mtime for path in files), UTC)
        aside = out / f"earlier-{last:%Y%m%d-%H%M%S}"
        aside.mkdir(exist_ok=True)
        for path in files:
            path.replace(aside / path.name)


class _Interrupts:
    """The signals that a run was sent, and when the first was heard of."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first_s = -math.inf

    def note(self, number: int) -> None:
        if not self.numbers:
            self.first_s = time.monotonic()
        self.numbers.append(number)


@contextmanager
def _answering(is_spawned: bool, is_launched: bool, is_main: bool) -> Generator[_Interrupts]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are noted; a second one ends the program again. In a rank that this program
    spawned, Ctrl-C is ignored.

    In a process that another one has started, it's the other's to tell of it, and to end this one at the second: there,
    one may come from the terminal and one from the other process. The other sends SIGINT; SIGTERM ends at once.

    Of launched ranks the main one tells of it. A second signal right after the first is the first, passed on by the
    launcher. Once one was noted, what comes after the block is only the end: Ctrl-C still ends it at once, but what a
    launcher sends to ranks that outlive others does not.
    """
    interrupts = _Interrupts()
    is_child = multiprocessing.parent_process() is not None

    def is_passed_on() -> bool:
        return is_launched and time.monotonic() - interrupts.first_s < IN_SUCCESSION_S

    def note(number: int, frame: Any) -> None:
        if is_passed_on():
            return
        if interrupts.numbers and not is_child:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        interrupts.note(number)
        if is_child or not is_main:
            return
        with suppress(RuntimeError):  # a stream cannot be written to in the middle of its writing
            stopped = STOPPED[signal.Signals(number)]
            tell(f"\n{stopped}: this step is finished and saved first. Once more ends at once, without.")

    def end(number: int, frame: Any) -> None:
        if number == signal.SIGINT and not is_passed_on():
            end_at_once(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {}
    if is_child or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell may have it ignored
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN if is_spawned else note)
    if not is_spawned and not is_child:
        before |= answer_requests(note)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            answer(number, end if is_launched and interrupts.numbers else handler)
