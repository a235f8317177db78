"""Intervals against closed forms, brute force, scipy and scikit-learn, and their errors at 28 clusters."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from analysis.intervals import FISHER, IDENTITY, LOGIT, median, proportion, resample, studentised, t_interval
from analysis.weighted import auc, combination, rank_correlation, spearman, task_mean

LEVELS = (0.95, 1 - 0.05 / 3)


def clustered(rng, clusters=28, cells=12, decimals=3):
    cluster = np.repeat(np.arange(clusters), cells)
    x = rng.normal(size=clusters)[cluster] + rng.normal(size=len(cluster))
    return np.round(x, decimals), np.round(x + rng.normal(size=len(cluster)), decimals), cluster


def copies(weights, cluster, n):
    """Positions of the rows of a resample: each cluster as often as it was drawn, from its Rao-Wu weights."""
    return np.repeat(np.arange(len(cluster)), np.rint(weights * (n - 1) / n).astype(int)[cluster])


# ---------------------------------------------------------------- resamples


def test_resamples_draw_within_tasks() -> None:
    tasks = ["a"] * 5 + ["b"] * 3
    weights = resample(tasks, 400, 1).weights
    assert np.allclose(weights[:, :5].sum(1), 5) and np.allclose(weights[:, 5:].sum(1), 3)
    assert set(np.unique(np.rint(weights[:, :5] * 4 / 5))) <= set(range(5))


def test_the_variance_of_a_stratified_mean_is_unbiased() -> None:
    """Against the textbook: sum over tasks of (n_t / n)^2 s_t^2 / n_t; drawing n_t of n_t would give a half for n_t = 2."""
    rng = np.random.default_rng(0)
    tasks = np.repeat(np.arange(12), 2)
    y = rng.normal(size=24) + tasks
    boot = resample(tasks, 40_000, 1)
    truth = np.sqrt(sum(4 / 24**2 * y[tasks == t].var(ddof=1) / 2 for t in range(12)))
    assert np.std(boot.weights @ y / 24) == pytest.approx(truth, rel=0.02)
    linear = boot.linearised((y - y.mean())[None] / 24, boot.ones)
    assert linear[0] == pytest.approx(truth)


def test_single_clusters_of_tasks_are_taken_together() -> None:
    together = resample(["a", "a", "a", "b", "c"], 50, 1)
    assert np.bincount(together.tasks).tolist() == [3, 2] and together.weights[:, 3:].std() > 0
    assert np.bincount(resample(["a", "a", "a", "b"], 50, 1).tasks).tolist() == [4]
    assert np.bincount(resample(["a", "b", "c"], 50, 1).tasks).tolist() == [3]


def test_same_seed_same_interval_other_seed_other() -> None:
    x, y, cluster = clustered(np.random.default_rng(1))
    tasks = [0] * 28

    def both(seed):
        boot = resample(tasks, 500, seed)
        return [
            studentised(spearman(x, y, cluster), boot, FISHER).at(0.95),
            proportion(np.bincount(cluster, x > 0) * 1.0, np.full(28, 12.0), 28, boot).at(0.95),
        ]

    assert both(3) == both(3)
    assert all(one != other for one, other in zip(both(3), both(4), strict=True))


# ---------------------------------------------------------------- proportions, differences, medians


def test_a_proportion_is_the_formula() -> None:
    rng = np.random.default_rng(2)
    hits, totals = rng.binomial(9, 0.9, 28).astype(float), np.full(28, 9.0)
    boot = resample([0] * 28, 2000, 5)
    share = proportion(hits, totals, 28, boot)
    p = hits.sum() / totals.sum()
    shares = []
    for weights in boot.weights:  # the resamples one by one, as lists of documents
        drawn = np.repeat(np.arange(28), np.rint(weights * 27 / 28).astype(int))
        shares.append(hits[drawn].sum() / totals[drawn].sum())
    for level in LEVELS:
        t = stats.t.ppf(1 - (1 - level) / 2, 27)
        centre, reach = np.log(p / (1 - p)), t * np.std(shares, ddof=1) / (p * (1 - p))
        assert share.at(level) == pytest.approx([1 / (1 + np.exp(-(centre + s * reach))) for s in (-1, 1)])
    assert share.value == p


def test_no_miss_and_no_hit_have_the_exact_bound() -> None:
    boot, totals = resample([0] * 28, 100, 1), np.full(28, 6.0)
    for level in LEVELS:
        tail = (1 - level) / 2
        assert proportion(totals, totals, 84, boot).at(level) == (pytest.approx(tail ** (1 / 84)), 1.0)
        assert proportion(0 * totals, totals, 84, boot).at(level) == (0.0, pytest.approx(1 - tail ** (1 / 84)))
    assert stats.beta.ppf(0.025, 84, 1) == pytest.approx(0.025 ** (1 / 84))  # Clopper and Pearson


def test_clusters_widen_what_duplicates_would_narrow() -> None:
    """Each of 28 documents asked the same question 20 times: 28 observations, not 560."""
    rng = np.random.default_rng(3)
    once = rng.binomial(1, 0.8, 28).astype(float)
    boot, naive = resample([0] * 28, 4000, 1), resample([0] * 560, 4000, 1)
    single = proportion(once, np.ones(28), 28, boot).at(0.95)
    clustered_ = proportion(20 * once, np.full(28, 20.0), 28, boot).at(0.95)
    flat = proportion(np.repeat(once, 20), np.ones(560), 560, naive).at(0.95)
    assert clustered_ == pytest.approx(single)
    assert clustered_[1] - clustered_[0] > 3 * (flat[1] - flat[0])


def test_a_difference_is_t_on_the_mean_over_tasks() -> None:
    rng = np.random.default_rng(4)
    tasks = np.repeat([0, 1], [10, 18])
    sums, totals = rng.normal(size=28) + 3 * tasks, np.ones(28)
    boot = resample(tasks, 20_000, 1)
    gap = t_interval(task_mean(sums, totals, boot.tasks), boot)
    assert gap.value == pytest.approx((sums[:10].mean() + sums[10:].mean()) / 2)
    error = np.sqrt(sum(sums[tasks == t].var(ddof=1) / (tasks == t).sum() for t in (0, 1))) / 2
    low, high = gap.at(0.95)
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 27) * error, rel=0.03)


def test_a_median_agrees_with_order_statistics() -> None:
    values = np.random.default_rng(5).exponential(size=401)
    low, high = median(values, np.arange(401), resample([0] * 401, 4000, 1)).at(0.95)
    ranks = stats.binom.ppf([0.025, 0.975], 401, 0.5).astype(int)
    expected = np.sort(values)[ranks]
    assert (low, high) == pytest.approx(expected, rel=0.06)
    assert low < np.median(values) < high


def test_half_of_the_ties_lie_below_a_median() -> None:
    values = np.repeat([0.0, 1.0, 2.0], [30, 40, 30])
    assert median(values, np.arange(100), resample([0] * 100, 500, 1)).at(0.95) == (1, 1)


def test_one_cluster_has_an_estimate_and_no_interval() -> None:
    boot = resample(["a"], 10, 1)
    share = proportion(np.array([3.0]), np.array([4.0]), 4, boot)
    assert share.value == 0.75 and np.isnan(share.bounds(0.95)).all()


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_spearman_of_resamples_is_scipys(decimals: int) -> None:
    x, y, cluster = clustered(np.random.default_rng(6), decimals=decimals)
    boot = resample([0] * 28, 20, 1)
    values, _ = spearman(x, y, cluster)(boot.weights)
    for weights, value in zip(boot.weights, values, strict=True):
        rows = copies(weights, cluster, 28)
        assert value == pytest.approx(stats.spearmanr(x[rows], y[rows])[0], abs=1e-12)
    assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)
    assert spearman(x, y, cluster)(boot.ones)[0][0] == pytest.approx(rank_correlation(x, y), abs=1e-12)


def test_spearman_knows_unequal_clusters_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    cluster = np.sort(rng.integers(0, 6, 90))
    x, y = rng.normal(size=(2, 90))
    weights = rng.random((11, 6)) + 0.5
    whole = spearman(x, y, cluster)(weights)
    monkeypatch.setattr("analysis.weighted.BATCH", 60)
    for one, other in zip(whole, spearman(x, y, cluster)(weights), strict=True):
        assert np.allclose(one, other, rtol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    rng = np.random.default_rng(8)
    x, y, cluster = clustered(rng, clusters=7, decimals=1)
    cell, positive = rng.integers(0, 3, len(x)), y > 0
    two = [auc(score, positive, cell, cluster, 7)[0] for score in (x, rng.normal(size=len(x)))]
    weights, step = rng.random((4, 7)) + 0.5, 1e-6 * np.eye(7)
    for statistic in (spearman(x, y, cluster), two[0], combination([(1.0, two[0]), (-1.0, two[1])])):
        _, gradient = statistic(weights)
        for k in range(7):
            slope = (statistic(weights + step[k])[0] - statistic(weights - step[k])[0]) / 2e-6
            assert gradient[:, k] == pytest.approx(slope, abs=1e-7)


def test_a_studentised_interval_is_never_narrower_than_t() -> None:
    wider = np.zeros(2, int)
    for seed in range(20):
        x, y, cluster = clustered(np.random.default_rng([13, seed]), cells=4)
        boot, statistic = resample([0] * 28, 300, seed), spearman(x, y, cluster)
        value, gradient = statistic(boot.ones)
        reach = stats.t.ppf(0.975, 27) * boot.linearised(gradient, boot.ones)[0] / (1 - value[0] ** 2)
        low, high = np.arctanh(studentised(statistic, boot, FISHER).at(0.95))
        excess = np.array([np.arctanh(value[0]) - reach - low, high - np.arctanh(value[0]) - reach])
        assert (excess > -1e-9).all()
        wider += excess > 1e-9
    assert wider.min() >= 3, "the bootstrap's own quantiles must be used where they are wider"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longer_side_of_a_bootstrap_t_is_that_of_the_longer_tail(sign: int) -> None:
    """A mean of skewed clusters: where it came out low its standard error did too, so the interval reaches up."""
    values = np.exp(1.2 * np.random.default_rng(14).normal(size=28))

    def mean(weights):
        found = weights @ values / weights.sum(1)
        return found, (values - found[:, None]) / weights.sum(1, keepdims=True)

    boot = resample([0] * 28, 4000, 1)
    error, t = boot.linearised(mean(boot.ones)[1], boot.ones)[0], boot.t(0.025)
    whole = studentised(lambda w: tuple(sign * part for part in mean(w)), boot, IDENTITY)
    down, up = ((whole.value - whole.at(0.95)[0]) / error, (whole.at(0.95)[1] - whole.value) / error)
    short, long = (down, up) if sign > 0 else (up, down)
    assert short == pytest.approx(t) and long > 1.2 * t


def test_rank_correlation_without_ranks_is_undefined() -> None:
    assert np.isnan(rank_correlation(np.ones(5), np.arange(5.0)))
    assert np.isnan(rank_correlation(np.ones(1), np.ones(1)))


# ---------------------------------------------------------------- AUC


def test_auc_of_resamples_is_scikit_learns() -> None:
    x, y, cluster = clustered(np.random.default_rng(9), decimals=0)
    boot = resample([0] * 28, 20, 1)
    statistic, one_class = auc(x, y > 0.5, np.zeros(len(x), int), cluster, 28)
    for weights, value in zip(boot.weights, statistic(boot.weights)[0], strict=True):
        rows = copies(weights, cluster, 28)
        assert value == pytest.approx(roc_auc_score(y[rows] > 0.5, x[rows]))
    assert one_class == 0


def test_auc_weighs_cells_by_pairs_and_counts_one_class_cells() -> None:
    score = np.array([1, 2, 3, 10, 20, 30, 40, 5.0, 6.0])
    positive = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    cell = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])  # the last has one class: undefined, never 0
    statistic, one_class = auc(score, positive, cell, np.arange(9), 9)
    first, second = (roc_auc_score(positive[cell == c], score[cell == c]) for c in (0, 1))
    assert statistic(np.ones((1, 9)))[0][0] == pytest.approx((2 * first + 4 * second) / 6)
    assert one_class == 1
    nothing, all_one_class = auc(score[7:], positive[7:], cell[7:], np.arange(2), 2)
    assert all_one_class == 1 and np.isnan(nothing(np.ones((1, 2)))[0][0])
    assert studentised(nothing, resample([0, 0], 10, 1), LOGIT).value is None


def test_pooled_auc_misleads_where_cells_differ_and_the_pair_weighted_does_not() -> None:
    """Simpson: the score only says which cell a request is in; one cell fails often and scores high."""
    rng = np.random.default_rng(10)
    cell = np.repeat([0, 1], 400)
    failed = rng.random(800) < np.where(cell == 0, 0.2, 0.8)
    score = 3 * cell + rng.normal(size=800)
    statistic, _ = auc(score, failed, cell, np.arange(800) // 20, 40)
    assert roc_auc_score(failed, score) > 0.75
    assert abs(statistic(np.ones((1, 40)))[0][0] - 0.5) < 0.06


def test_a_perfect_auc_is_bounded_by_its_clusters() -> None:
    cluster, positive = np.arange(40) // 2, np.tile([True, False], 20)
    statistic, _ = auc(positive * 1.0, positive, np.zeros(40, int), cluster, 20)
    whole = studentised(statistic, resample([0] * 20, 200, 1), LOGIT)
    assert whole.value == 1 and whole.at(0.95) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


# ---------------------------------------------------------------- errors at 28 clusters


def worst_count(n: int, share: float) -> int:
    """What n trials with that error rate exceed once in a thousand times."""
    return int(stats.binom.ppf(0.999, n, share))


def test_a_correlation_errs_on_each_side_as_seldom_as_it_says() -> None:
    """500 studies of 28 documents; jointly normal, so the true Spearman correlation is 6 / pi asin(rho / 2)."""
    rho, studies = 0.9108, 500
    truth = 6 / np.pi * np.arcsin(rho / 2)
    cluster, wrong = np.repeat(np.arange(28), 12), np.zeros((2, 2), int)
    for study in range(studies):
        rng = np.random.default_rng([11, study])
        shared = [np.sqrt(0.2) * rng.normal(size=28)[cluster] + np.sqrt(0.8) * rng.normal(size=336) for _ in range(2)]
        x, y = shared[0], rho * shared[0] + np.sqrt(1 - rho**2) * shared[1]
        interval = studentised(spearman(x, y, cluster), resample([0] * 28, 300, study), FISHER)
        for k, level in enumerate(LEVELS):
            low, high = interval.at(level)
            wrong[k] += low > truth, high < truth
    for k, level in enumerate(LEVELS):
        assert wrong[k].max() <= worst_count(studies, (1 - level) / 2), wrong
    assert wrong[0].min() >= 2, "intervals that never err are too wide"


def test_an_auc_errs_on_each_side_as_seldom_as_it_says() -> None:
    studies, truth = 500, stats.norm.cdf(0.5 / np.sqrt(2))
    cluster, wrong = np.repeat(np.arange(28), 6), np.zeros(2, int)
    for study in range(studies):
        rng = np.random.default_rng([12, study])
        positive = rng.random(168) < 0.4
        score = 0.5 * positive + np.sqrt(0.3) * rng.normal(size=28)[cluster] + np.sqrt(0.7) * rng.normal(size=168)
        statistic, _ = auc(score, positive, np.zeros(168, int), cluster, 28)
        low, high = studentised(statistic, resample([0] * 28, 300, study), LOGIT).at(0.95)
        wrong += low > truth, high < truth
    assert wrong.max() <= worst_count(studies, 0.025), wrong
