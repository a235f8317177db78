"""A session on one model: the ordinary generate() runs on a certified cache; in the end all is undone."""

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from cert.errors import CertError
from cert.gate import Gate
from cert.hf import arguments, checks, report
from cert.hf.attention import give_back, take_over
from cert.hf.cache import CertifiedCache
from cert.hf.call import Call, Gated, given_cache
from cert.hf.serve import Serving
from cert.hf.together import Row, Together, check_asked
from cert.policy import Policy


class Session(Serving):
    """An open certified() block. A request is one generate(), or one fresh cache in a loop of your own."""

    @property
    def certificates(self) -> dict[str, list[Any]]:
        """Columns request, step, layer, head, position, radius, relative, out_norm, assisted, flags, reason.

        With audit=True also err, the served error, and var_hat and max_term, of which a radius is made.
        """
        return report.table(self)

    def summary(self, request: int | None = None) -> dict[str, Any]:
        """Of the last request, or of `request`: certificate, budgets, bytes by kind, kernel and why, prefill tokens.

        What an earlier request says is what it was when that request ended. Raises CertError for one that never was.
        """
        request = self.request if request is None else request
        known = arguments.number(request, Integral) in self.reasons
        arguments.expect(known, "request", request, f"one of the {len(self.reasons)} so far, counted from 0")
        return report.summary(self, request)

    @property
    def cache_kwargs(self) -> dict[str, CertifiedCache]:
        """How generate() or a forward continues from the session's cache, given the full ids."""
        return {self._keyword: self._current()}

    @torch.no_grad()
    def prefill(self, ids: Tensor | list[int], chunk: int | None = None) -> Tensor:
        """Feed token ids without compressing, appended to the session's conversation; reset() begins another one.

        A generate() from an empty cache is none, unless compress() or cache_kwargs went on with it. ids [n] or
        [batch, n]; chunk: tokens a forward, all at once by default. Returns the logits [batch, vocabulary] of the last
        token. Raises CertError for anything else.
        """
        self._require_idle()
        rows = arguments.as_rows(ids).to(self.model.device)
        fits = chunk is None or arguments.number(chunk, Integral) >= 1
        arguments.expect(fits, "chunk", chunk, "at least 1 token, or None for all")
        if not self._talking:
            self.reset()
        self._talking = self.feeding = True
        try:
            for part in rows.split(chunk or rows.shape[1], dim=1):
                given = {} if self.cache is None else self.cache_kwargs
                out = self.model(input_ids=part, use_cache=True, **given, **self._last_logits)
            self._conversation = self.cache
        finally:
            self.feeding = False
        return out.logits[:, -1]

    def compress(self, like: CertifiedCache | None = None) -> None:
        """Compress now: after the context (agnostic), after a turn (streaming).

        like: another cache, compressed at this length and before where this one was: top-k then keeps as many tokens
        as it did, head by head.
        Raises CertError where nothing was fed, a forward of another cache came between, or `like` cannot be followed.
        """
        self._require_open()
        cache = self._current()
        if self._answered and cache.ids is not None:
            self._begin(len(cache.ids), cache)
        checks.check_like(cache, like)
        self._compress(cache, like)
        self._conversation, self._talking = cache, True

    def fork(self, policy: Policy | None = None, of: CertifiedCache | None = None) -> dict[str, CertifiedCache]:
        """Go on with an independent copy of the session's cache, or `of` another: one prefill for many arms, questions.

        policy: the copy's own, while nothing was compressed; certified(arms=...) must have named its score. The copy is
        what compress(), prefill() and summary() then mean; returns its cache_kwargs. Raises CertError otherwise.
        """
        self._require_idle()
        arguments.expect(policy is None or isinstance(policy, Policy), "fork to policy", policy, "a Policy, or None")
        if of is None:
            of = self._current() if self._conversation is None else self._conversation
        source = checks.check_cache(of, self._owned)
        if source is None or source.ids is None:
            raise CertError("fork: nothing was fed yet")
        fork = source.fork(policy)
        self._owned.add(fork)
        self._begin(len(source.ids), fork)
        self._conversation, self._talking = fork, True
        return self.cache_kwargs

    def together(self, rows: Sequence[Row], size: int) -> dict[str, Together]:
        """Go on with several caches at once, one a row: the cache_kwargs of forwards of ids [size, m].

        rows: of row(), compressed, of one length and one row each. Certificates are recorded under their requests.
        Raises CertError for anything else.
        """
        self._require_open()
        check_asked(rows, size)
        self._check_rows(rows)
        return {self._keyword: Together(rows, size)}

    def row(self) -> Row:
        """The session's cache and its request, to go on with later, together with others."""
        return Row(self._current(), self.request, self.step)

    def escalate(self, budget: float) -> Any:
        """Run the last generate() again at a larger budget with the same coins; returns what generate() returns.

        At each event prob = max(prob at this budget, prob in that run and in its escalations to smaller budgets): a
        superset of what these retained is retained, and certificates and expected budget are those of this maximum.
        Raises CertError for a smaller budget, or where nothing was generated.
        """
        call, spent = self._call(), self.prefill_tokens
        policy, least = call.policy, call.policy.budget or call.policy.budget_tokens or 1.0
        fits = policy.design != "none" and (policy.budget or 0.0) <= arguments.number(budget) <= 1
        arguments.expect(fits, "escalate to", budget, f"a budget of at least the present {least}, and at most 1")
        checks.require(not call.liked, "escalate: this cache was compressed like another, whose counts no budget gives")
        self._policy = policy.with_budget(budget)
        self._smaller = tuple(plans for other, plans in call.runs.items() if other < budget)
        try:
            cache = None if call.begun is None else self._replay(*call.begun)
            kwargs = call.kwargs | ({} if cache is None else {self._keyword: cache})
            with call.same_randomness():
                return self._run(call, cache, kwargs, budget)
        finally:
            self._policy, self._smaller = self.options.policy, ()
            self.rerun_tokens += self.prefill_tokens - spent

    def recompute(self) -> Any:
        """Run the last generate() again on the model alone, full cache; returns what generate() returns."""
        call, spent = self._call(), self.prefill_tokens
        self._plain, self._prompt = True, call.ids.shape[1]
        try:
            give_back(self)
            with call.same_randomness():
                return self._generate(*call.args, **call.kwargs)
        finally:
            self._peak, self._full = report.held_bytes(self.cache, self._full), None
            self._plain, self._prompt = False, None
            take_over(self.model, self)
            self.rerun_tokens += self.prefill_tokens - spent

    def gated(self, gate: Gate, *args: Any, **kwargs: Any) -> tuple[Any, Gated]:
        """generate(*args, **kwargs), whose certificate the gate looks at: escalated or recomputed where that is due.

        Returns what generate() returns, of the run that answered, and how it came to that. Recomputed always, it is the
        full cache's output exactly; never, the compressed run's. The full prompt is fed again in both, so in a
        conversation ask on a fork(): an escalation leaves its own cache as the session's. Raises CertError, before any
        work, for a session without certificates, more than one row, or an escalation to no larger budget.
        """
        self._require_idle()
        cache = checks.check_cache(given_cache(kwargs), self._owned)
        policy = self.options.policy if cache is None else cache.policy
        each = checks.generation(self.model, args, kwargs)[0].num_return_sequences or 1
        checks.check_gate(gate, policy, self.options.delta, each * len(checks.prompt_ids(args, kwargs)))
        spent, rerun = self.prefill_tokens, self.rerun_tokens
        outs = [self._checked_generate(*args, **kwargs)]
        facts, spent, escalated = self.summary(), self.prefill_tokens - spent, None
        decision = gate.decide(certificate := report.decisive(facts))
        if decision == "escalate" and gate.escalate_to is not None:
            outs.append(self.escalate(gate.escalate_to))
            escalated = report.decisive(self.summary())
            if gate.decide(escalated, escalated=True) == "recompute":
                decision = "recompute"
        if decision == "recompute":
            outs.append(self.recompute())
        *rejected, out = outs
        return out, Gated(
            facts["request"], decision, certificate, escalated, spent, self.rerun_tokens - rerun,
            facts["cache_bytes_after"], facts["cache_bytes_before"], self._peak if decision == "recompute" else None,
            tuple(rejected),
        )  # fmt: skip

    def _call(self) -> Call:
        self._require_idle()
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
