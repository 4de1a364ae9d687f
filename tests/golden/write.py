"""Write the golden values anew, and say what changed: `python tests/golden/write.py [subject ...]`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")  # both as conftest.py does
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch

from golden.pins import differences
from golden.subjects import SUBJECTS


def main(names):
    torch.set_default_dtype(torch.float64)
    for name in names or SUBJECTS:
        subject = SUBJECTS[name]
        before = subject.stored()["sections"] if subject.path.exists() else {}
        after = {}
        for section in subject.values():
            torch.manual_seed(0)
            after[section.name] = section.values()
            if section.name not in before:
                print(f"{name} | {section.name} | new, {len(after[section.name])} values")
                continue
            for line in differences(after[section.name], before[section.name], section.tolerance):
                print(f"{name} | {section.name} | {line}")
        for gone in sorted(before.keys() - after.keys()):
            print(f"{name} | {gone} | gone")
        subject.write(after)


if __name__ == "__main__":
    main(sys.argv[1:])
