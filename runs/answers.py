"""The columns of a row that an answer fills: tokens, scores, certificates, self-signals, budgets."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from runs import locomo_metrics
from runs.decode import Answer
from runs.examples import Example, Request
from runs.metrics import METRIC_VERSION, contains, score

NO_STEP = "no step: the first token, from the dense prefill, ended the answer"
UNDEFINED = "undefined at every step: no sampled token retained"
VERSIONS = {"locomo": locomo_metrics.METRIC_VERSION}  # of the others LongBench's
OWN: dict[str, Callable[[Request, str], float]] = {  # metrics with one score, not an official and a corrected one
    "contains": lambda request, text: contains(text, request.answers),
    "locomo": lambda request, text: locomo_metrics.score(request.kind, text, request.answers[0]),
}
CERTIFICATES = ("certificate", "certificate_assisted", "certificate_mean", "certificate_top", "certificate_max")


def answer_columns(example: Example, request: Request, answer: Answer, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The measured columns of one answer but n_tokens and wall_s, from the summary() of its request."""
    budgets = ("budget_tokens", "budget_raised", "expected_budget", "realised_budget")
    return {
        "context_tokens": len(example.context),
        "prompt_tokens": len(example.context) + len(request.ids),
        "answer_tokens": len(answer.ids),
        "truncated": example.truncated,
        "logprob": answer.logprob,
        "stop": answer.stop,
        **_scores(example, request, answer),
        **_certificates(summary),
        **{name: summary[name] for name in ("entropy", "margin") if name in summary},
        **{name: summary[name] for name in budgets},
        "cache_bytes_before": summary["prefix_bytes_before"],
        "cache_bytes_after": summary["prefix_bytes_after"],
    }


def version(metric: str) -> str:
    """The version of the code that computes a metric: part of every cell id."""
    return VERSIONS.get(metric, METRIC_VERSION)


def _scores(example: Example, request: Request, answer: Answer) -> dict[str, Any]:
    """Prediction, references and scores of an answer."""
    classes = list(request.all_classes) or None
    columns = {
        "prediction": answer.text,
        "answers": json.dumps(request.answers, ensure_ascii=False),
        "all_classes": classes and json.dumps(classes, ensure_ascii=False),
        "metric": f"{example.metric} {version(example.metric)}",
    }
    if example.metric in OWN:
        found = OWN[example.metric](request, answer.text)
        return columns | {"official": found, "corrected": found, "scorer_exception": False, "scorer_error": None}
    both = score(example.task, answer.text, request.answers, classes)
    raised = {"scorer_exception": both.scorer_exception, "scorer_error": both.exception_name}
    return columns | {"official": both.official, "corrected": both.corrected, **raised}


def _certificates(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The request certificate's columns; null with the reason where there is none."""
    found, assisted = summary["certificate"], summary["assisted_certificate"]
    if found is None or not found["steps"]:
        why = summary["no_certificate"] or NO_STEP
        nulls = dict.fromkeys((*CERTIFICATES, "undefined_share", "certificate_layers"))
        return nulls | {"cert_steps": 0, "cert_flagged": False, "no_certificate": why}
    values = (found["value"], assisted["value"], *(found[x] for x in ("mean_relative", "top_decile", "max_relative")))
    return dict(zip(CERTIFICATES, values, strict=True)) | {
        "undefined_share": found["undefined_share"],
        "cert_steps": found["steps"],
        "cert_flagged": found["flagged"],
        "certificate_layers": json.dumps(found["per_layer"]),
        "no_certificate": UNDEFINED if found["value"] is None else None,
    }
