"""S1 (Santurkar et al. 2018), the experiments: what each says, and the criterion fixed before running it.

A row of the tables is one run: `model` (vgg, dln), `norm` (none, batch, noisy, noise, l1, l2, linf), `seed`, readings.
"""

from __future__ import annotations

from normgauge.papers.court.registry import empirical
from normgauge.papers.court.tables import Margins, Rows, by_seed, paired, paired_log10

CITE = ("santurkar2018",)
CHANCE = 0.1  # CIFAR-10


@empirical(
    "S1-ICS",
    place="sec 2.2, Fig 3 (deep linear network)",
    printed="25-layer 10x10 deep linear net, full batch: with BN the gradients G, G' before/after updating earlier "
    "layers are almost "
    "uncorrelated; without BN ICS is ~0",
    study="covariate-shift",
    criterion="on the deep linear network, averaged over layers and training: |cosine| with BN below 0.3, and "
    "cosine without "
    "BN above 0.9",
    cite=CITE,
)
def _shift(rows: Rows) -> Margins:
    with_bn = by_seed(rows, "cosine", model="dln", norm="batch")
    without = by_seed(rows, "cosine", model="dln", norm="none")
    return {
        "0.3 - |cosine| with BN": [0.3 - abs(value) for value in with_bn.values()],
        "cosine without BN - 0.9": [value - 0.9 for value in without.values()],
    }


@empirical(
    "S1-E1",
    place="Fig 1, App A",
    printed="VGG on CIFAR-10: test accuracy 83 % with BN vs 80 % without (92/88 % with augmentation), 15000 steps, "
    "batch 128, lr .1",
    study="performance",
    criterion="test accuracy with BN minus without is above 0, with and without augmentation",
    cite=CITE,
)
def _accuracy(rows: Rows) -> Margins:
    return {
        f"test accuracy, batch minus none, augmentation {'on' if on else 'off'}": paired(
            rows, "test_accuracy", "batch", "none", model="vgg", augmentation=on
        )
        for on in (False, True)
    }


@empirical(
    "S1-E2",
    place="sec 2.1, Fig 2, Alg 1; S3 Theoretical Understanding",
    printed="noisy BN (n_mu=.5, n_sigma=1.25, r=.1) trains as well as BN and better than no BN",
    study="noisy-batchnorm",
    criterion="training accuracy of noisy BN at most 0.02 below BN's, and above that of no BN",
    cite=CITE,
)
def _noisy(rows: Rows) -> Margins:
    loss = paired(rows, "train_accuracy", "noisy", "batch", model="vgg")
    return {
        "0.02 + (noisy minus batch), training accuracy": [0.02 + value for value in loss],
        "noisy minus none, training accuracy": paired(rows, "train_accuracy", "noisy", "none", model="vgg"),
    }


@empirical(
    "S1-E4",
    place="sec 3.3, Fig 5",
    printed="l1, l2, linf normalization (scale computed before the mean shift) perform comparably to BN",
    study="lp-norms",
    criterion="on VGG, training accuracy of each at most 0.02 below BN's",
    cite=CITE,
)
def _lp(rows: Rows) -> Margins:
    return {
        f"0.02 + ({norm} minus batch), training accuracy": [
            0.02 + value for value in paired(rows, "train_accuracy", norm, "batch", model="vgg")
        ]
        for norm in ("l1", "l2", "linf")
    }


@empirical(
    "S1-noise",
    place="sec 2.1, last but one paragraph",
    printed="adding the same amount of noise to the activations of the standard (non-BatchNorm) network prevents "
    "it from training "
    "entirely",
    study="noisy-batchnorm",
    criterion="training accuracy of the network with noise and without BN stays below chance + 0.05",
    cite=CITE,
    note="Not in the list the ledger started from.",
)
def _noise_alone(rows: Rows) -> Margins:
    found = by_seed(rows, "train_accuracy", model="vgg", norm="noise")
    return {"chance + 0.05 minus training accuracy": [CHANCE + 0.05 - value for value in found.values()]}


@empirical(
    "S1-l1",
    place="sec 3.3",
    printed="for deep linear networks, l1-normalization performs even better than BatchNorm",
    study="lp-norms",
    criterion="on the deep linear network the final training loss with BN is above that with l1",
    cite=CITE,
    note="Not in the list the ledger started from.",
)
def _l1_wins(rows: Rows) -> Margins:
    return {"log10 of final training loss, batch over l1": paired_log10(rows, "train_loss", "batch", "l1", model="dln")}
