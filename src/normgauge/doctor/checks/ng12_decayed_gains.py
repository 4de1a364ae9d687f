"""NG12: weight decay on all gains and shifts.

Decay pulls gains towards zero, which nobody asked for. For: ResNet and GPT recipes leave them out; against: measured
gains are small and disagree (van Laarhoven 2017, Summers and Dinneen 2020). Gains stored as 1+w decay to 1.
Fix: Let the roles decide the groups:
    groups = ng.param_groups(objective, dict(lr=1e-3, weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups)
References: pytorch#1402, yolov5#4104, transformers#35927.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", needs="optimizer", exactness="state_only")
def _look(exam: Exam) -> Signs:
    decay = {name: float(group.get("weight_decay") or 0.0) for name, group in exam.groups.items()}
    inside = [name for name in exam.gains if decay.get(name)]
    if inside and all(decay.values()):
        most = max(decay[name] for name in inside)
        yield Sign(inside[0], f"{len(inside)} gains and shifts, the first here, decay by {most:g}", most)
