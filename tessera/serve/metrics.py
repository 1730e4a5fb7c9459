"""What the engine counts, and what Prometheus calls it. Times are in seconds; a histogram's buckets are those below or
at each bound."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS = tuple(step * 10.0**power for power in range(-4, 3) for step in (1, 2, 5))


@dataclass
class Histogram:
    """How often, how much altogether, and how often up to each of `BOUNDS`."""

    count: int = 0
    total: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.buckets[bisect_left(BOUNDS, value)] += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Metrics:
    """Since the engine began; `running` to `cached_blocks` are as of now."""

    requests: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # answers by reason
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    device_idle: float = 0.0  # seconds between steps in which the device had nothing to do, and somebody waited
    step_limit: float = 0.0  # seconds that the machine needs at least for the steps that were computed
    host_idle: float = 0.0  # seconds for which the host waited for the device
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    queued: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)


# vLLM's names -> ours, and what is told of them.
GAUGES = {
    "num_requests_running": ("running", "Sequences that the engine computes"),
    "num_requests_waiting": ("waiting", "Sequences that wait for their turn"),
    "kv_cache_blocks": ("blocks", "Blocks of the cache"),
    "prefix_cache_blocks": ("cached_blocks", "Blocks that nobody owns and that are kept for reuse"),
}
COUNTERS = {
    "num_preemptions": ("preemptions", "Sequences that gave way and are computed again"),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "generation_tokens": ("new_tokens", "Tokens that were generated"),
    "prefix_cache_hits": ("reused_tokens", "Tokens of prompts that were found in the cache"),
    "prefix_cache_queries": ("prompt_tokens", "Tokens of prompts that were looked for in the cache"),
    "spec_decode_num_draft_tokens": ("drafted", "Tokens that were guessed"),
    "spec_decode_num_accepted_tokens": ("accepted", "Tokens that were guessed rightly"),
    "requests_refused": ("refused", "Requests that cannot fit, or for which the queue had no room"),
    "engine_steps": ("steps", "Steps that the engine computed"),
    "device_idle_seconds": ("device_idle", "Time between steps in which the device did nothing and somebody waited"),
    "engine_step_limit_seconds": ("step_limit", "The least time that the machine needs for the steps computed"),
    "host_idle_seconds": ("host_idle", "Time for which the host waited for the device"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From a request's arrival to its first token"),
    "inter_token_latency_seconds": ("between_tokens", "Between two tokens of one answer"),
    "e2e_request_latency_seconds": ("whole", "From a request's arrival to its end"),
    "request_queue_time_seconds": ("queued", "From a request's arrival to the step that begins it"),
    "engine_step_seconds": ("step", "One step of the engine"),
}
