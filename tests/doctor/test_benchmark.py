"""Recall on seeded faults, silence on their twins and on clean models: some of them always, all of them when heavy."""

import pytest
import torch
from benchmarks.doctor import faults, zoo  # noqa: F401
from benchmarks.doctor.cases import CASES
from benchmarks.doctor.run import look, run_faults, run_zoo, summary

SOME = ["groupnorm_on_vectors", "checkpoint_without_buffers", "tracking_switched_off", "poisoned_variance",
        "norm_never_called", "training_hard_coded", "filter_by_type_misses_custom_rms", "gains_in_bfloat16",
        "checkpointed_block", "leftover_batch_of_one", "batchnorm_on_tokens", "pre_norm_without_last_norm"]  # fmt: skip


@pytest.fixture(autouse=True)
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_found_and_its_repaired_twin_is_quiet(name):
    case = CASES[name]
    assert case.cause in {finding.id for finding in look(case.make(True))}
    assert case.cause not in {finding.id for finding in look(case.make(False))}


@pytest.mark.parametrize("name", ["resnet18_batch", "former_rms", "former_post", "LlamaForCausalLM"])
def test_a_clean_model_is_clean(name):
    [row] = run_zoo([name])
    assert not row["alarms"] and row["cost"] <= 60


def test_there_are_enough_of_them():
    assert sum(not case.historical for case in CASES.values()) >= 60
    assert sum(bool(case.historical) for case in CASES.values()) >= 12
    assert len(zoo.zoo()) >= 40


@pytest.mark.heavy
def test_recall_and_precision():
    total = summary(run_faults(), run_zoo())
    assert total["recall"] >= 0.95 and total["twins_quiet"] == total["faults"]
    assert not total["models_with_error"] and not total["models_with_two_warnings"]
