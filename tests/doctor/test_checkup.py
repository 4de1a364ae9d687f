"""The checkup as a whole: contract, purity, fold, documents, fixes, wrong use."""

import copy
import json
import re

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.doctor import all_checks, sick_model
from normgauge.errors import InputError
from normgauge.testing import check_result


def batch(n=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.randint(0, 2, (n,), generator=g)


def net(**kw):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **kw), nn.ReLU(), nn.Linear(8, 2))


def test_the_result_keeps_the_contract():
    check_result(ng.checkup(net(), batch()))
    check_result(ng.checkup(net(momentum=0.99), batch()))


def test_every_check_says_everything():
    for name, item in all_checks().items():
        words = item.words
        assert words["id"] == name and words["title"] and words["remedy"] and words["references"], name
        assert all(len(line) <= 74 for line in words["remedy"].splitlines()[1:]), f"{name}: code fits a terminal"
        assert words["meaning"].count(". ") >= 1, f"{name}: the explanation has two sentences"


def test_the_sick_example_is_sick():
    model, pair, optimizer = sick_model()
    found = {finding.id for finding in ng.checkup(model, pair, optimizer=optimizer)}
    assert {"NG02", "NG03", "NG07", "NG10", "NG45"} <= found


def test_nothing_is_left_on_the_model():
    model, pair, optimizer = sick_model()
    before, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    ng.checkup(model, pair, optimizer=optimizer)
    assert all(
        torch.equal(a, b) or a.isnan().any() for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert flags == [m.training for m in model.modules()] and torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_three_findings_at_most_above_the_fold_and_80_columns():
    model, pair, optimizer = sick_model()
    text = ng.checkup(model, pair, optimizer=optimizer).text()
    assert sum(line.startswith(("ERROR", "WARNING", "INFO")) for line in text.splitlines()) == 3
    assert all(len(line) <= 80 for line in text.splitlines()) and "Folded" in text


def test_fixes_are_proved_and_the_model_is_not_touched():
    model, pair, optimizer = sick_model()
    checkup = ng.checkup(model, pair, optimizer=optimizer)
    repaired = checkup.fix()
    assert repaired.proof < 1e-5 and torch.isfinite(repaired.model[6].running_var).all()
    assert model[4].momentum == 0.99 and abs(repaired.model[4].momentum - 0.01) < 1e-9
    assert not {f.id for f in ng.checkup(repaired.model, pair)} & {"NG07", "NG10"}
    assert repaired.undo()[4].momentum == 0.99


def test_documents():
    model, pair, _ = sick_model()
    checkup = ng.checkup(model, pair)
    document = json.loads(checkup.to_json())
    assert len(document["findings"]) == len(checkup) and document["healthy"] is False
    log = checkup.sarif()
    assert log["version"] == "2.1.0" and {r["ruleId"] for r in log["runs"][0]["results"]} == {f.id for f in checkup}


def test_suppression_by_id_and_module():
    model, pair = net(momentum=0.99), batch()
    assert not [f for f in ng.checkup(model, pair, ignore=["NG07"]) if f.id == "NG07"]
    assert not [f for f in ng.checkup(model, pair, ignore=["NG07:1"]) if f.id == "NG07"]
    assert [f for f in ng.checkup(model, pair, ignore=["NG07:0*"]) if f.id == "NG07"]


def test_objectives_wrappers_and_no_targets():
    pair = batch()
    for subject, given in (
        (ng.Objective(net(momentum=0.99), nn.functional.cross_entropy, pair, mode="eval"), None),
        (nn.DataParallel(net(momentum=0.99)), pair),
        (torch.compile(net(momentum=0.99)), pair),
        (net(momentum=0.99), pair[0]),
        (net(momentum=0.99), {"input": pair[0]}),
    ):
        assert "NG07" in {f.id for f in ng.checkup(subject, given)}


def test_random_inputs_are_said():
    checkup = ng.checkup(net(), batch()[0], real=False)
    assert checkup.left_out["NG06"] == "random inputs, no data" and "random inputs" in checkup.text()


@pytest.mark.parametrize("given", [(3, None), (nn.Linear(1, 1), None), (nn.Linear(1, 1), "x")])
def test_wrong_use_is_explained(given):
    with pytest.raises(InputError, match="checkup"):
        ng.checkup(*given)


def test_a_size_of_three_is_not_huge_behind_small_embeddings():
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.LayerNorm(8))), nn.Linear(8, 3))
    with torch.no_grad():
        for part in net:
            part.weight.mul_(3.0 if isinstance(part, nn.Linear) else 1.0)
        net[0].weight.mul_(1e-5)
        net[0].bias.zero_()
    inputs = torch.randn(16, 8)
    assert "NG34" not in [finding.id for finding in ng.checkup(net, inputs)]
    with torch.no_grad():
        net[4].weight.mul_(1e3)
    assert "NG34" in [finding.id for finding in ng.checkup(net, inputs)]


def test_one_is_counted_in_the_singular():
    found = ng.checkup(net(momentum=0.99), batch())
    said = found.meaning() + found.text()
    assert not re.search(r"\b1 (errors|warnings|notes)\b", said) and re.search(r"\b0 errors\b|\b1 error\b", said)


@pytest.mark.parametrize("momentum", [1e-4, 0.1])
def test_statistics_that_momentum_left_at_their_start_name_it(momentum):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 3))
    source = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        inputs = 10.0 + 10.0 * torch.randn(64, 4, generator=source)
        nn.functional.cross_entropy(model(inputs), inputs.argmax(1) % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    if momentum == 0.1:
        model[1].running_mean += 100.0  # off for another reason
    pair = (inputs, inputs.argmax(1) % 3)
    (found,) = (f for f in ng.checkup(model, pair) if f.id == "NG06")
    assert ("momentum 0.0001 is the cause: after 60 batches 99% of them" in found.evidence) is (momentum < 0.1)
