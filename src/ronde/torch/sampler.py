"""The sampler that gives each rank its share of a dataset and can say, exactly, where training stands.

    sampler = ShardedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    while sampler.epoch < num_epochs:
        for batch in sampler.track(loader):
            ...                      # a checkpoint made here, after optimizer.step(), counts this batch as used

What it does is in training/sample_sharding.py, for all frameworks.
"""

from __future__ import annotations

import torch.utils.data

from ronde.training.sample_sharding import SampleShard


class ShardedSampler(SampleShard, torch.utils.data.Sampler[int]):
    """A sampler that gives each rank its share of a dataset, in an order that depends only on the seed and the epoch.

    `ends` says what happens when the samples cannot be divided evenly: "pad" (default) repeats a few so that every rank
    has equally many; "drop" leaves a few out; "uneven" gives every sample to exactly one rank, so that some ranks run
    out one batch earlier than others: those call ronde.join() after their loop, which gives zeros to the collectives of
    the others until all have joined. Use "uneven" for evaluation, with average_metrics(…, count=…).
    """

    def _check_loader(self, loader: object) -> None:
        # With a forgotten `sampler=`, every rank would see all of the data. A sampler of an unknown class is accepted,
        # since it may draw from this one.
        batches = getattr(loader, "batch_sampler", None)
        source = getattr(loader if batches is None else batches, "sampler", None)
        if source is not self and isinstance(source, INDEPENDENT_SAMPLERS):
            raise ValueError(
                f"track(): this loader draws from a {type(source).__name__}, not from this sampler; "
                "make it with DataLoader(…, sampler=sampler)"
            )


INDEPENDENT_SAMPLERS = (
    ShardedSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.DistributedSampler,
)
"""Samplers that do not draw from another sampler."""
