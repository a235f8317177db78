import pytest
import yaml
from conftest import ROOT

from runs.arm import Arm, parse
from runs.errors import UserError


def test_a_name_is_its_arm() -> None:
    assert parse("full") == Arm("full", "full", 1.0) and parse("full again") == Arm("full", "full", 1.0, 1)
    assert parse("topk aware 0.25") == Arm("topk", "aware", 0.25)
    assert parse("poisson agnostic 0.1 draw 2") == Arm("poisson", "agnostic", 0.1, 1)
    profiles = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs/profile").glob("*.yaml")]
    names = [name for one in profiles for grid in ("tasks", "synthetic") if grid in one for name in one[grid]["arms"]]
    assert len(names) > 11 and all(parse(name).name == name for name in names)


@pytest.mark.parametrize(
    "text",
    ["", "Full", "full 1.0", "full full 1.0", "full aware 1.0", "topk full 0.5", "topk aware", "topk aware 0.250",
     "topk aware .25", "topk aware 1", "topk aware 0.0", "topk aware 1.5", "snapkv aware 0.5", "topk aware 0.5 draw 2",
     "poisson aware 0.5 draw 1", "poisson aware 0.5 draw 3", "full again again", "topk aware 0.5\n", "topk  aware 0.5",
     "topk aware 1.0.0"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected"):
        parse(text)


def test_an_arm_that_is_none_is_refused() -> None:
    for wrong in (
        ("full", "full", 0.5),
        ("full", "aware", 1.0),
        ("topk", "aware", 0.5, 1),
        ("poisson", "aware", 0.5, 2),
    ):
        with pytest.raises(UserError, match="expected"):
            Arm(*wrong)
    with pytest.raises(UserError):
        Arm("poisson", "aware", float("nan"))
