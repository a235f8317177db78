"""A session on one model: the ordinary generate() runs on a certified cache; in the end all is undone."""

import inspect
import itertools
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cert.errors import CertError
from cert.hf import checks, report
from cert.hf.attention import NAME, give_back, take_over
from cert.hf.cache import CertifiedCache
from cert.hf.call import CACHE_NAMES, Call, given_cache, random_state, without_cache
from cert.hf.compress import compress
from cert.hf.state import OPEN, Options, State
from cert.policy import Policy


class Session(State):
    """An open certified() block. A request is one generate(), or one fresh cache in a loop of your own."""

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        super().__init__(options)
        self.model = model
        self.cache: CertifiedCache | None = None  # of the last forward
        self._policy = options.policy  # what new caches get: another one while escalating
        self._owned: WeakSet[CertifiedCache] = WeakSet()
        self._prompt: int | None = None  # length of generate's prompt, while it runs
        self._talking = False  # whether prefill() goes on with the cache there is
        self._plain, self._over = False, False  # recompute(): the model alone; the block has ended
        self._last: Call | None = None
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        self._keyword = next(name for name in CACHE_NAMES if name in self._parameters)

    def _open(self) -> None:
        self.modules = {id(module): module for module in checks.attention_modules(self.model)}
        self.kernel = checks.first_kernel(self.model, self)
        OPEN.append(self)
        take_over(self.model, self)
        self._hook = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._generate: Any = self.model.generate
        self._patched = {k: v for k, v in self.model.__dict__.items() if k == "generate"}  # somebody else's, if any
        self.model.generate = self._checked_generate  # type: ignore[assignment] # on this instance, until the end

    def _close(self) -> None:
        if hasattr(self, "_hook"):
            self._hook.remove()
            self.model.__dict__.pop("generate", None)  # another tool may have taken it away
            self.model.__dict__.update(self._patched)
        give_back(self)
        OPEN[:] = [state for state in OPEN if state is not self]
        self.running, self._over = None, True
        for cache in self._owned:
            cache.terms.closed = True

    def _require_open(self) -> None:
        checks.require(not self._over, "this certified() session has ended: open another one")

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """Swap an empty cache for ours, and compress before the token that follows the prefill."""
        if self._plain:
            return None
        ours = all(module.config._attn_implementation == NAME for module in self.modules.values())
        checks.require(ours, f"the attention implementation was changed inside the block: expected {NAME!r} to its end")
        kwargs = dict(zip(self._parameters, args, strict=False)) | kwargs
        given, kwargs = given_cache(kwargs), without_cache(kwargs)
        checks.check_inputs(kwargs)
        use_cache = kwargs.get("use_cache")
        if given is None and not (self.model.config.get_text_config().use_cache if use_cache is None else use_cache):
            self.running = None
            return (), kwargs
        ids = kwargs["input_ids"]
        cache = checks.check_cache(given, self._owned)
        if cache is None:
            checks.refuse_own_cache(given if self._prompt is None else None)
            cache = self._fresh(len(ids))
        if cache is not self.cache:  # a fork, or another conversation of the caller's
            self._begin(len(ids), cache)
        if not self.feeding and self._due(cache, ids.shape[1]):
            self._compress(cache)
        if not cache.events or self.feeding:
            self.prefill_tokens += ids.numel()
        cache.feed(ids)
        self.running = cache
        return (), kwargs | {self._keyword: cache}

    def _fresh(self, rows: int) -> CertifiedCache:
        options, often = self.options, self.options.compress_every is not None
        cache = CertifiedCache(self.model.config, self._policy, options.audit, often, options.arms)
        self._owned.add(cache)
        self._begin(rows, cache)
        return cache

    def _begin(self, rows: int, cache: CertifiedCache) -> None:
        """A new request: its number, and why it has no certificate if so."""
        self.cache = cache
        self.request, self.step = max(self.reasons, default=-1) + 1, 0
        reason = cache.policy.no_certificate or (report.OFF if self.options.delta is None else None)
        self.reasons |= {self.request + row: reason for row in range(rows)}

    def _due(self, cache: CertifiedCache, new: int) -> bool:
        """Whether the prefill has ended, or enough tokens came since the last compression."""
        if cache.length == 0:
            return False
        if cache.events:
            every = self.options.compress_every
            return every is not None and cache.length - cache.events[-1] >= every
        return new == 1 if self._prompt is None else cache.length >= self._prompt

    def _compress(self, cache: CertifiedCache) -> None:
        compress(cache, self.options.seed, self.options.document)

    @property
    def certificates(self) -> dict[str, list[Any]]:
        """Columns request, step, layer, head, position, radius, relative, out_norm, assisted, flags, reason (and err)."""
        return report.table(self)

    def summary(self, request: int | None = None) -> dict[str, Any]:
        """Of the last request, or of `request`: certificate, budgets, bytes by kind, kernel and why, prefill tokens."""
        return report.summary(self, self._current(), self.request if request is None else request)

    @property
    def cache_kwargs(self) -> dict[str, CertifiedCache]:
        """How generate() or a forward continues from the session's cache, given the full ids."""
        return {self._keyword: self._current()}

    def _current(self) -> CertifiedCache:
        if self.cache is None:
            raise CertError("the session has no cache yet: prefill() or generate() first")
        return self.cache

    @torch.no_grad()
    def prefill(self, ids: Tensor | list[int], chunk: int | None = None) -> None:
        """Feed token ids without compressing, appended to the session's conversation; reset() begins another one.

        A generate() from an empty cache is none, unless compress() or cache_kwargs went on with it. ids [n] or
        [batch, n]; chunk: tokens a forward, all at once by default.
        """
        self._require_open()
        if not self._talking:
            self.reset()
        self._talking = True
        rows = torch.as_tensor(ids, device=self.model.device)
        rows = rows[None] if rows.ndim == 1 else rows
        self.feeding = True
        try:
            for part in rows.split(chunk or max(1, rows.shape[1]), dim=1):
                given = {} if self.cache is None else {self._keyword: self.cache}
                self.model(input_ids=part, use_cache=True, **given, **self._last_logits)
        finally:
            self.feeding = False

    def compress(self) -> None:
        """Compress now: after the context (agnostic), after a turn (streaming)."""
        self._require_open()
        self._compress(self._current())
        self._talking = True

    def fork(self, policy: Policy | None = None, of: CertifiedCache | None = None) -> dict[str, CertifiedCache]:
        """Go on with an independent copy of the session's cache, or `of` another: one prefill for many arms, questions.

        policy: the copy's own, while nothing was compressed; certified(arms=...) must have named its score. The copy is
        what compress(), prefill() and summary() then mean; returns its cache_kwargs. Raises CertError otherwise.
        """
        self._require_open()
        source = checks.check_cache(self._current() if of is None else of, self._owned)
        if source is None or source.ids is None:
            raise CertError("fork: nothing was fed yet")
        fork = source.fork(policy)
        self._owned.add(fork)
        self._begin(len(source.ids), fork)
        self._talking = True
        return self.cache_kwargs

    def reset(self) -> None:
        """The next prefill() begins a new conversation; what was recorded stays."""
        self.cache = self.running = None

    def escalate(self, budget: float) -> Any:
        """Run the last generate() again at a larger budget with the same coins; returns what generate() returns.

        A superset is retained but for a few tokens, where a dominant score is certain only at the larger budget. Raises
        CertError for a smaller budget, or where nothing was generated.
        """
        call, spent, policy = self._call(), self.prefill_tokens, self._call().policy
        if policy.design == "none" or (policy.budget is not None and budget < policy.budget):
            raise CertError(f"escalate to {budget}: expected a budget of at least the present {policy.budget or 1.0}")
        self._policy = policy.with_budget(budget)
        try:
            cache = None if call.begun is None else self._replay(*call.begun)
            kwargs = without_cache(call.kwargs) | ({} if cache is None else {self._keyword: cache})
            with call.same_randomness():
                return self._run(cache, call.ids, call.args, kwargs)
        finally:
            self._policy = self.options.policy
            self.rerun_tokens += self.prefill_tokens - spent

    def recompute(self) -> Any:
        """Run the last generate() again on the model alone, full cache; returns what generate() returns."""
        call = self._call()
        self.prefill_tokens += call.ids.numel()
        self.rerun_tokens += call.ids.numel()
        self._plain = True
        give_back(self)
        try:
            with call.same_randomness():
                return self._generate(*call.args, **without_cache(call.kwargs))
        finally:
            self._plain = False
            take_over(self.model, self)

    def _checked_generate(self, *args: Any, **kwargs: Any) -> Any:
        """generate(), refused by name where it cannot be served, its arguments kept."""
        checks.check_generate(self.model, args, kwargs)
        cache = checks.check_cache(given_cache(kwargs), self._owned)
        ids = checks.prompt_ids(args, kwargs)
        if cache is not None:
            checks.check_full_ids(ids, cache)
        begun = None if cache is None or cache.ids is None else (cache.ids, tuple(cache.events))
        policy = self._policy if cache is None else cache.policy
        self._last = Call(args, without_cache(kwargs), ids, random_state(), begun, policy)
        return self._run(cache, ids, args, kwargs)

    def _run(self, cache: CertifiedCache | None, ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cache is not None and self.step:
            self._begin(len(ids), cache)
        self._prompt, self._talking = ids.shape[1], cache is not None
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._prompt = None

    def _call(self) -> Call:
        self._require_open()
        if self._last is None:
            raise CertError("nothing to run again: no generate() in this session yet")
        return self._last

    def _replay(self, ids: Tensor, events: tuple[int, ...]) -> CertifiedCache:
        """A cache that was fed and compressed at the same places as the one the last generate() was given."""
        self.reset()
        cuts = sorted({0, *events, ids.shape[1]})
        for start, end in itertools.pairwise(cuts):
            self.prefill(ids[:, start:end])
            if end in events:
                self.compress()
        return self._current()
