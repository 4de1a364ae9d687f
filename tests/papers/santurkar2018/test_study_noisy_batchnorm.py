"""Study noisy-batchnorm: noise that prevents training is a measurement, other training that diverged is none."""

from normgauge.papers.studies import execute, find

TOO_LARGE = 1e4


def trained(norm, rate):
    plan = find("noisy-batchnorm").parts("smoke")[0].plan()
    return execute({**plan[0], "study": "noisy-batchnorm", "norm": norm, "lr": rate})


def test_noise_alone_that_diverges_is_measured():
    run = trained("noise", TOO_LARGE)
    assert run.ok and run.last("diverged") == 1.0, run.sentence
    assert run.last("train_accuracy") < 0.3
    assert trained("noise", 0.01).last("diverged") == 0.0


def test_other_training_that_diverges_is_no_measurement():
    assert trained("none", TOO_LARGE).status == "diverged"
