"""Bucketed data parallelism: gradients travel in buckets, each launched while backward still computes the next ones.

It hides communication behind computation as the overlapped wrapper does, and pays the fixed cost of a call once a
bucket (Li et al., PyTorch Distributed, VLDB 2020, section 3.2). Too small a bucket pays for many calls; too large a one
leaves a long last bucket that nothing hides (cs336_systems/accounting/communication.py has the model), so large buckets
are smaller towards the end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.buckets import Bucket, CoalescedBucket, FlatBucket, assign_buckets, make_flat_buckets
from cs336_systems.distributed.ddp_overlapped import OverlappingDataParallel


class BucketedDDP(OverlappingDataParallel):
    """Averages gradients with one collective a bucket, launched when the bucket's last gradient is ready.

    Buckets are launched in one order on all ranks, from the module's last parameters to its first.

    With `gradient_as_bucket_view` each gradient is a view into its bucket's buffer. `zero_grad(set_to_none=False)`, of
    this wrapper (one fill a bucket) or of the optimizer, keeps the views, and autograd adds to them in place: nothing
    is copied. After `set_to_none=True` autograd makes new gradients, and each is copied once into its view.

    Without it there are no buffers: a bucket's gradients travel from where autograd put them, as one group call.
    Nothing is copied with either kind of zero_grad, and gradients set to None free their memory.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float = 25.0,
        process_group: dist.ProcessGroup | None = None,
        gradient_as_bucket_view: bool = True,
        bucket_comm_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            bucket_size_mb: a bucket's largest size in MB (10**6 bytes); a larger parameter has a bucket to itself. Of
                more than 25, the first and the last buckets are smaller (`assign_buckets` says why).
            bucket_comm_dtype: the dtype in which gradients travel and are summed, e.g. torch.bfloat16 for half the
                bytes of float32; None keeps their own. Every rank ends with the same, rounded gradients.

        Raises:
            ValueError: `bucket_size_mb` is not positive, `bucket_comm_dtype` is not a real floating dtype, or as
                `DataParallel` says.
        """
        if bucket_comm_dtype is not None and not bucket_comm_dtype.is_floating_point:
            raise ValueError(f"bucket_comm_dtype={bucket_comm_dtype}: must be a floating dtype, e.g. torch.bfloat16")
        super().__init__(module, process_group)
        portions = assign_buckets(self._trainable, bucket_size_mb)
        self._set_portions(portions)
        members = [[self._trainable[index] for index in portion] for portion in portions]
        n_flags = [len(self._trainable) if i == self._last_portion else 0 for i in range(len(portions))]
        self._buckets: list[Bucket]
        if gradient_as_bucket_view:
            self._buckets = [*make_flat_buckets(members, n_flags, self.process_group, bucket_comm_dtype)]
        else:
            self._buckets = [
                CoalescedBucket(parameters, n, self.process_group, bucket_comm_dtype)
                for parameters, n in zip(members, n_flags, strict=True)
            ]
        self._place = {
            index: (bucket, i)
            for bucket, portion in zip(self._buckets, portions, strict=True)
            for i, index in enumerate(portion)
        }

    @property
    def n_buckets(self) -> int:
        """The number of collectives a step."""
        return len(self._buckets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or zero them with one fill a bucket and make them views again.

        A gradient that is zero, not None, makes an optimizer with weight decay move its parameter even in a step that
        did not use it."""
        if set_to_none:
            super().zero_grad(set_to_none=True)
            return
        for bucket in self._buckets:
            if isinstance(bucket, FlatBucket):
                bucket.zero_gradients()
            else:
                for parameter in bucket.parameters:
                    if parameter.grad is not None:
                        parameter.grad.zero_()

    def _take(self, index: int) -> None:
        bucket, i = self._place[index]
        bucket.take(i)

    def _launch(self, portion: int) -> None:
        bucket = self._buckets[portion]
        bucket.launch(self._flags(bucket.parameters[0]) if portion == self._last_portion else None)

    def _finish(self) -> None:
        for bucket in self._buckets:
            bucket.finish()
        self._adopt_missing(
            self._buckets[-1].flags, lambda index: self._place[index][0].averaged[self._place[index][1]]
        )
        for bucket in self._buckets:
            bucket.release()
