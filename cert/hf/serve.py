"""What happens at each forward and generate() of a session: whose cache it is, when it is compressed, what is counted."""

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import PreTrainedModel

from cert.errors import CertError
from cert.hf import arguments, checks, report
from cert.hf.attention import NAME, give_back, take_over
from cert.hf.cache import CertifiedCache
from cert.hf.call import CACHE_NAMES, Call, given_cache, kept, random_state, without_cache
from cert.hf.compress import compress
from cert.hf.families import longrope_length
from cert.hf.plans import Plans
from cert.hf.state import OPEN, Options, State
from cert.hf.together import Row, Together


class Serving(State):
    """The model's hook and its generate(), from the opening of the block to its end."""

    def __init__(self, model: PreTrainedModel, options: Options) -> None:
        super().__init__(options)
        self.model = model
        self._conversation: CertifiedCache | None = None  # of the last prefill(), fork(), compress() or generate()
        self._policy = options.policy  # what new caches get: another one while escalating
        self._smaller: tuple[Plans, ...] = ()  # what runs at smaller budgets decided, while escalating
        self._owned: WeakSet[CertifiedCache] = WeakSet()
        self._prompt: int | None = None  # length of generate's prompt, while it runs
        self._mine: CertifiedCache | None = None  # the cache it runs on, from its first forward on
        self._answered = False  # the request had its generate(): what follows is another
        self._talking = False  # whether prefill() goes on with the cache there is
        self._plain, self._over = False, False  # recompute(): the model alone; the block has ended
        self._full: Any = None  # the plain cache of a recompute(), while it runs
        self._peak: int | None = None  # bytes of that one and the session's own, at its end
        self._last: Call | None = None
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        config = model.config.get_text_config(decoder=True)
        self._vocabulary: int = config.vocab_size
        self._longrope = longrope_length(config)
        self._keyword = next(name for name in CACHE_NAMES if name in self._parameters)

    def _open(self) -> None:
        self.modules = {id(module): module for module in checks.attention_modules(self.model)}
        self._generate: Any = self.model.generate
        self._patched = {k: v for k, v in self.model.__dict__.items() if k == "generate"}  # somebody else's, if any
        self.kernel = checks.first_kernel(self.model, self)
        OPEN.append(self)
        take_over(self.model, self)
        self._hook = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self.model.generate = self._checked_generate  # type: ignore[assignment] # on this instance, until the end

    def _close(self) -> None:
        give_back(self)  # first of all, and what cannot fail
        OPEN[:] = [state for state in OPEN if state is not self]
        self.running, self._over = None, True
        for cache in self._owned:
            cache.terms.closed = True
        if hasattr(self, "_hook"):
            self._hook.remove()
            self.model.__dict__.pop("generate", None)  # another tool may have taken it away
            self.model.__dict__.update(self._patched)

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """Swap an empty cache for ours, and compress before the token that follows the prefill."""
        self.batch = None
        kwargs = dict(zip(self._parameters, args, strict=False)) | kwargs
        given, kwargs = given_cache(kwargs), without_cache(kwargs)
        if self._plain:
            self._full = given
            fed = 0 if given is None else given.get_seq_length()
            self.prefill_tokens += kwargs["input_ids"].numel() if fed < (self._prompt or 0) else 0
            return None
        ours = all(module.config._attn_implementation == NAME for module in self.modules.values())
        checks.require(ours, f"the attention implementation was changed inside the block: expected {NAME!r} to its end")
        checks.check_inputs(kwargs)
        if given is None and not self._wants(kwargs, "use_cache"):
            self.running = None
            return (), kwargs
        weights = self._wants(kwargs, "output_attentions")
        checks.require(not weights, "output_attentions: evicted rows have no weights, so that none are returned")
        ids = arguments.check_ids("forward", kwargs.get("input_ids"))
        if isinstance(given, Together):
            self._feed_rows(given, ids, kwargs.get("position_ids"))
            return (), kwargs | {self._keyword: given}
        cache = checks.check_cache(given, self._owned)
        seen = self._check_kept(cache, ids.shape[1])
        arguments.check_mask(kwargs.get("attention_mask"), len(ids), seen + ids.shape[1])
        arguments.check_fed(ids, self._vocabulary, kwargs.get("position_ids"), seen)
        if cache is None:
            checks.refuse_own_cache(given if self._prompt is None else None)
            cache = self._fresh(len(ids))
        if cache is not self.cache or self._answered:  # a fork, another conversation of the caller's, or its next turn
            self._begin(len(ids), cache)
        if not self.feeding and self._due(cache, ids.shape[1]):
            self._compress(cache)
        if not cache.events or self.feeding:
            self.prefill_tokens += ids.numel()
        cache.feed(ids)
        self.running = cache
        return (), kwargs | {self._keyword: cache}

    def _check_kept(self, cache: CertifiedCache | None, new: int) -> int:
        """Tokens seen so far. Inside generate() a forward goes on with the cache it began with: some models drop it."""
        begun = cache if self._prompt is None else self._mine
        seen = 0 if begun is None else begun.length
        checks.check_rotation(self._longrope, seen, seen + new if self._prompt is None else max(self._prompt, seen + 1))
        kept = begun is None or cache is begun
        checks.require(kept, checks.PARTED.format(name=type(self.model).__name__))
        return seen

    def _feed_rows(self, given: Together, ids: Tensor, position_ids: Any) -> None:
        self._check_rows(given.rows)
        seen = given.get_seq_length()
        arguments.check_fed(ids, self._vocabulary, position_ids, seen)
        checks.check_rotation(self._longrope, seen, seen + ids.shape[1])
        given.feed(ids)
        self.batch = given

    def _check_rows(self, rows: Sequence[Row | None]) -> None:
        checks.require(self.options.compress_every is None, "together: compress_every would part caches of one length")
        for row in rows:
            if row is not None:
                checks.check_cache(row.cache, self._owned)

    def _wants(self, kwargs: dict[str, Any], name: str) -> bool:
        """A flag of a forward, or the config's where it was not given."""
        value = kwargs.get(name)
        return bool(getattr(self.model.config.get_text_config(), name, False) if value is None else value)

    def _fresh(self, rows: int) -> CertifiedCache:
        options, often = self.options, self.options.compress_every is not None
        what = f"document {options.document!r} for a batch of {rows}: expected None (each row's own SHA-256)"
        checks.require(options.document is None or rows == 1, what)
        cache = CertifiedCache(self.model.config, self._policy, options.audit, often, options.arms)
        cache.terms.signals = options.signals
        self._owned.add(cache)
        self._mine = None if self._prompt is None else cache
        self._begin(rows, cache)
        return cache

    def _begin(self, rows: int, cache: CertifiedCache) -> None:
        """A new request: its number, and why it has no certificate if so."""
        self._end()
        self.cache, self._answered = cache, False
        self.request, self.step = max(self.reasons, default=-1) + 1, 0
        reason = cache.policy.no_certificate or (report.OFF if self.options.delta is None else None)
        self.reasons |= {self.request + row: reason for row in range(rows)}

    def _end(self) -> None:
        """What belongs to the request stays as it is now."""
        if self.cache is not None:
            facts = report.cache_facts(self)
            self.ended |= {request: facts for request in self.reasons if request >= self.request}

    def reset(self) -> None:
        """The next prefill() begins a new conversation; what was recorded stays."""
        self._require_idle()
        self._end()
        self.cache = self.running = self._conversation = None

    def _require_open(self) -> None:
        checks.require(not self._over, "this certified() session has ended: open another one")

    def _require_idle(self) -> None:
        self._require_open()
        checks.require(self._prompt is None, checks.RUNNING)

    def _due(self, cache: CertifiedCache, new: int) -> bool:
        """Whether the prefill has ended, or enough tokens came since the last compression."""
        if cache.length == 0:
            return False
        if cache.events:
            every = self.options.compress_every
            return every is not None and cache.length - cache.events[-1] >= every
        return new == 1 if self._prompt is None else cache.length >= self._prompt

    def _compress(self, cache: CertifiedCache, like: CertifiedCache | None = None) -> None:
        compress(cache, self.options.seed, self.options.document, self._smaller, like)

    def _current(self) -> CertifiedCache:
        """The cache to go on with; refused where a forward of another one came between."""
        if self.cache is None:
            raise CertError("the session has no cache yet: prefill() or generate() first")
        if self._conversation is not None and self.cache is not self._conversation:
            raise CertError(
                "the last forward was of another cache: fork() goes on with the conversation, reset() ends it"
            )
        return self.cache

    def _checked_generate(self, *args: Any, **kwargs: Any) -> Any:
        """generate(), refused by name where it cannot be served, its arguments kept."""
        self._require_idle()
        checks.check_generate(self.model, args, kwargs)
        cache = checks.check_cache(given_cache(kwargs), self._owned)
        ids = checks.prompt_ids(args, kwargs)
        arguments.check_mask(kwargs.get("attention_mask"), *ids.shape)
        if cache is not None:
            checks.check_full_ids(ids, cache)
        begun = None if cache is None or cache.ids is None else (cache.ids, tuple(cache.events))
        policy = self._policy if cache is None else cache.policy
        mine = tuple(map(kept, args)), {name: kept(value) for name, value in without_cache(kwargs).items()}
        liked = cache is not None and cache.liked
        self._last = Call(*mine, ids.clone(), random_state(), begun, policy, liked)
        return self._run(self._last, cache, kwargs, policy.budget or 0.0)

    def _run(self, call: Call, cache: CertifiedCache | None, kwargs: dict[str, Any], budget: float) -> Any:
        """generate() from this cache, or from an empty one; what its compressions decide is kept with the call."""
        if cache is None:
            self.reset()
        self._prompt, self._mine, self._talking = call.ids.shape[1], cache, cache is not None
        self._answered |= self.step > 0
        try:
            return self._generate(*call.args, **kwargs)
        finally:
            used, self._prompt, self._mine = self._mine, None, None
            self._answered, self._conversation = True, used
            if used is not None:
                call.runs[budget] = used.plans
