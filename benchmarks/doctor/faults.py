"""Seeded faults: each a sick network and the same network repaired."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.doctor.cases import RMS, Block, Former, conv_net, fault, groups, images, mlp, sequences, train, vectors


@fault("NG01")
def two_samples_in_batchnorm1d(sick):
    return dict(model=mlp(), batch=vectors(2 if sick else 64))


@fault("NG01")
def eight_samples_in_batchnorm1d(sick):
    return dict(model=mlp(), batch=vectors(8 if sick else 64))


@fault("NG01")
def one_sample_raises(sick):
    return dict(model=mlp(), batch=vectors(1 if sick else 64))


@fault("NG01")
def global_pool_branch(sick):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16) if sick else nn.Identity()
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), norm, nn.Flatten(), nn.Linear(16, 4))  # fmt: skip
    return dict(model=net, batch=images(6))


@fault("NG01")
def leftover_batch_of_one(sick):
    data = TensorDataset(*vectors(129))
    return dict(model=mlp(), batch=vectors(64), loader=DataLoader(data, 64, drop_last=not sick))


@fault("NG02")
def groupnorm_on_vectors(sick):
    torch.manual_seed(0)
    return dict(model=mlp(norm=lambda w: nn.GroupNorm(w if sick else 2, w)), batch=vectors())


@fault("NG02")
def layernorm_of_two(sick):
    torch.manual_seed(0)
    width = 2 if sick else 16
    net = nn.Sequential(nn.Linear(12, width), nn.LayerNorm(width), nn.Linear(width, 4))
    return dict(model=net, batch=vectors())


@fault("NG02")
def layernorm_over_singleton(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm, self.head = nn.Linear(12, 16), nn.LayerNorm(1 if sick else 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.fc(x)
            return self.head(self.norm(h.unsqueeze(-1)).squeeze(-1) if sick else self.norm(h))

    return dict(model=Net(), batch=vectors())


@fault("NG02")
def instancenorm_on_a_matrix(sick):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.InstanceNorm1d(16) if sick else nn.LayerNorm(16), nn.Linear(16, 4))
    return dict(model=net, batch=vectors())


@fault("NG03")
def frozen_backbone(sick):
    net = train(conv_net(), images())
    for p in net[:6].parameters():
        p.requires_grad_(False)
    if not sick:
        for i in (1, 4):
            old = net[i]
            net[i] = Frozen(old)
    return dict(model=net, batch=images())


class Frozen(nn.Module):
    """Statistics and gains as constants."""

    def __init__(self, norm):
        super().__init__()
        self.register_buffer("scale", norm.weight.detach() / (norm.running_var + norm.eps).sqrt())
        self.register_buffer("shift", norm.bias.detach() - norm.running_mean * self.scale)

    def forward(self, x):
        """Scale and shift."""
        return x * self.scale.view(1, -1, 1, 1) + self.shift.view(1, -1, 1, 1)


@fault("NG03")
def eval_once_is_undone(sick):
    net = train(conv_net(), images()).train()
    if sick:
        net[1].eval()
    return dict(model=net, batch=images())


@fault("NG04")
def tracking_switched_off(sick):
    net = train(conv_net(), images())
    net[1].track_running_stats = not sick
    return dict(model=net, batch=images())


@fault("NG05")
def checkpoint_without_buffers(sick):
    net = train(conv_net(), images())
    if sick:
        for i in (1, 4):
            net[i].reset_running_stats()
    return dict(model=net, batch=images())


@fault("NG05")
def one_layer_lost_its_statistics(sick):
    net = train(mlp(), vectors())
    if sick:
        net[4].reset_running_stats()
    return dict(model=net, batch=vectors())


@fault("NG05")
def momentum_zero(sick):
    return dict(model=train(conv_net(momentum=0.0 if sick else 0.1), images()), batch=images())


@fault("NG06")
def data_moved_away(sick):
    net = train(conv_net(), images(), steps=60)
    x, y = images()
    return dict(model=net, batch=(x * 4 + 6, y) if sick else (x, y))


@fault("NG06")
def statistics_of_another_model(sick):
    net = train(mlp(), vectors(), steps=60)
    if sick:
        net[1].running_mean += 4 * net[1].running_var.sqrt()
    return dict(model=net, batch=vectors())


@fault("NG06")
def variances_off_by_a_hundred(sick):
    net = train(conv_net(), images(), steps=60)
    if sick:
        net[4].running_var *= 100
    return dict(model=net, batch=images())


@fault("NG07")
def momentum_from_tensorflow(sick):
    return dict(model=train(conv_net(momentum=0.99 if sick else 0.01), images(), steps=5), batch=images())


@fault("NG07")
def momentum_four_tenths(sick):
    return dict(model=train(mlp(momentum=0.4 if sick else 0.1), vectors()), batch=vectors())


@fault("NG08")
def averaged_without_buffers(sick):
    net = conv_net()
    mean = AveragedModel(net, use_buffers=not sick)
    for _ in range(3):
        train(net, images(), steps=5)
        mean.update_parameters(net)
    return dict(model=mean, batch=images())


@fault("NG09")
def checkpointed_block(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            net = conv_net()
            self.stem, self.body, self.head = net[:1], net[1:6], net[6:]

        def forward(self, x):
            x = self.stem(x)
            return self.head(checkpoint(self.body, x, use_reentrant=False) if sick else self.body(x))

    return dict(model=train(Net(), images(), steps=5), batch=images())


@fault("NG10")
def poisoned_variance(sick):
    net = train(conv_net(), images())
    if sick:
        net[1].running_var[2] = float("inf")
    return dict(model=net, batch=images())


@fault("NG10")
def negative_variance(sick):
    net = train(conv_net(), images())
    if sick:
        net[1].running_var[2] = -0.5
    return dict(model=net, batch=images())


@fault("NG11")
def rms_in_half_precision(sick):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), RMS(16, upcast=not sick), nn.Linear(16, 4)).half()
    x, y = vectors()
    with torch.no_grad():
        net[0].weight.mul_(400)
    return dict(model=net, batch=(x.half(), y))


@fault("NG11")
def batchnorm_buffers_in_bfloat16(sick):
    net = train(conv_net(), images())
    return dict(
        model=net.bfloat16() if sick else net, batch=(images()[0].bfloat16() if sick else images()[0], images()[1])
    )


@fault("NG11")
def normalize_zero_rows_in_half(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.head = nn.Linear(12, 16, bias=False), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(F.normalize(self.fc(x), dim=-1, eps=1e-12 if sick else 1e-4))

    x, y = vectors()
    return dict(model=Net().half(), batch=(torch.cat([x[:1] * 0, x[1:]]).half(), y))


@fault("NG12")
def everything_decays(sick):
    net = conv_net()
    return dict(
        model=net,
        batch=images(),
        optimizer=torch.optim.AdamW(net.parameters() if sick else groups(net), weight_decay=0.05),
    )


@fault("NG13")
def subclass_with_activation(sick):
    class Act(nn.BatchNorm2d):
        def forward(self, x):
            return F.relu(super().forward(x))

    return dict(model=conv_net(norm=Act if sick else nn.BatchNorm2d), batch=images())


@fault("NG14")
def conv_bias_before_batchnorm(sick):
    return dict(model=conv_net(bias=sick), batch=images())


@fault("NG14")
def linear_bias_before_batchnorm(sick):
    return dict(model=mlp(bias=sick), batch=vectors())


@fault("NG15")
def dropout_then_batchnorm(sick):
    torch.manual_seed(0)
    drop = [nn.Dropout(0.5), nn.BatchNorm1d(32)] if sick else [nn.BatchNorm1d(32), nn.Dropout(0.5)]
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), *drop, nn.Linear(32, 4))
    return dict(model=net, batch=vectors(256))


@fault("NG15")
def dropout_linear_batchnorm(sick):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.6 if sick else 0.0), nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 4))  # fmt: skip
    return dict(model=net, batch=vectors(256))


@fault("NG16")
def one_norm_two_domains(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.a, self.head = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
            self.b = self.a if sick else nn.BatchNorm1d(16)

        def forward(self, x):
            return self.head(F.relu(self.a(self.fc(x)))) + self.head(F.relu(self.b(self.fc(3 * x + 4))))

    return dict(model=Net(), batch=vectors())


@fault("NG17")
def padded_sequences(sick):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(6, 16, 1, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4))  # fmt: skip
    x = torch.randn(16, 6, 20)
    for row in range(16):
        x[row, :, 20 - row % 12 :] = 0 if sick else x[row, :, 20 - row % 12 :]
    return dict(model=net, batch=(x, torch.arange(16) % 4))


@fault("NG18")
def four_micro_batches(sick):
    net = mlp()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-3)
    for _ in range(10):
        for _ in range(4 if sick else 1):
            F.cross_entropy(net(vectors()[0]), vectors()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model=net, batch=vectors(), optimizer=optimizer)


@fault("NG20")
def samples_meet(sick):
    return dict(model=mlp(norm=nn.BatchNorm1d if sick else nn.LayerNorm), batch=vectors())


@fault("NG21")
def instance_norm_tracks(sick):
    return dict(
        model=train(conv_net(norm=nn.InstanceNorm2d, track_running_stats=sick, affine=True), images()), batch=images()
    )


@fault("NG22")
def batchnorm_on_tokens(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.fc(x)
            return self.head((self.norm(h) if sick else self.norm(h.transpose(1, 2)).transpose(1, 2)).mean(1))

    return dict(model=Net(), batch=sequences(length=16))


@fault("NG22")
def layernorm_over_width(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.conv(x)
            h = self.norm(h) if sick else self.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.head(h.mean((2, 3)))

    return dict(model=Net(), batch=images())


def torch_encoder(depth=4, norm_first=True, norm=True, same=False):
    """Return torch's encoder with a mean over positions behind it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
    stack = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(16) if norm else None, enable_nested_tensor=False)
    if not same:
        for p in stack.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)
    return nn.Sequential(stack, nn.Flatten(), nn.Linear(160, 4))


@fault("NG23")
def torch_encoder_without_last_norm(sick):
    return dict(model=torch_encoder(norm=not sick), batch=sequences())


@fault("NG23")
def torch_encoder_of_equal_layers(sick):
    return dict(model=torch_encoder(same=sick), batch=sequences())


@fault("NG23")
def torch_encoder_with_doubled_last_norm(sick):
    return dict(model=torch_encoder(norm_first=False, norm=sick), batch=sequences())


@fault("NG24")
def fifty_batchnorm_layers(sick):
    return dict(model=mlp(width=32, depth=50 if sick else 4), batch=vectors(128))


@fault("NG25")
def l2_inside_adam(sick):
    net = conv_net()
    kind = torch.optim.Adam if sick else torch.optim.AdamW
    return dict(model=net, batch=images(), optimizer=kind(groups(net), lr=1e-3))


@fault("NG26")
def spectral_norm_before_batchnorm(sick):
    net = conv_net()
    if sick:
        parametrizations.spectral_norm(net[3])
    return dict(model=net, batch=images())


@fault("NG27")
def old_weight_norm(sick):
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    (nn.utils.weight_norm if sick else parametrizations.weight_norm)(net[0])
    return dict(model=net, batch=vectors())


@fault("NG28")
def conv_used_with_and_without_norm(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            net = conv_net()
            self.conv, self.norm, self.head = net[0], net[1], net[6:]

        def forward(self, x):
            h = self.conv(x)
            return self.head(F.relu(self.norm(h)) + (self.conv(0.5 * x) if sick else h))

    return dict(model=Net(), batch=images())


@fault("NG29")
def half_of_the_gains_are_zero(sick):
    net = train(conv_net(), images())
    if sick:
        with torch.no_grad():
            net[1].weight[:6] = 0
    return dict(model=net, batch=images())


@fault("NG29")
def collapsed_variance(sick):
    net = train(conv_net(), images())
    if sick:
        with torch.no_grad():
            net[3].weight[:4] = 0
        train(net, images(), steps=200, lr=0.0)
    return dict(model=net, batch=images())


@fault("NG30")
def gains_drawn_like_weights(sick):
    net = Former()
    if sick:
        for block in net.blocks:
            nn.init.normal_(block.norm1.weight, 0, 0.02)
    return dict(model=net, batch=sequences())


@fault("NG30")
def gains_are_nan(sick):
    net = Former()
    if sick:
        net.blocks[1].norm2.weight.data[3] = float("nan")
    return dict(model=net, batch=sequences())


@fault("NG30")
def one_plus_w_started_at_one(sick):
    return dict(model=Former(norm=lambda w: RMS(w, plus_one=True, start=1.0 if sick else 0.0)), batch=sequences())


@fault("NG31")
def batchnorm_under_vmap(sick):
    return dict(model=mlp(track_running_stats=sick), batch=vectors())


@fault("NG34")
def huge_attention_logits(sick):
    net = Former()
    if sick:
        with torch.no_grad():
            net.blocks[1].attn.in_proj_weight.mul_(20)
    return dict(model=Sdpa(50.0 if sick else 1.0), batch=sequences())


class Sdpa(nn.Module):
    """One head of attention by torch's function."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.head, self.scale = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 4), scale

    def forward(self, x):
        """Attend and pool."""
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(self.scale * q, k, v).squeeze(1).mean(1))


@fault("NG35")
def training_hard_coded(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm, self.head = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)

        def forward(self, x):
            n = self.norm
            h = F.batch_norm(self.fc(x), n.running_mean, n.running_var, n.weight, n.bias, True if sick else n.training)
            return self.head(F.relu(h))

    return dict(model=train(Net(), vectors()), batch=vectors())


@fault("NG35")
def train_flag_that_ignores_eval(sick):
    class Stubborn(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(True if sick else mode)

    return dict(model=train(mlp(norm=Stubborn), vectors()), batch=vectors())


@fault("NG36")
def one_channel_per_group(sick):
    return dict(model=conv_net(norm=lambda w: nn.GroupNorm(w if sick else 4, w)), batch=images())


@fault("NG40")
def rows_of_zeros(sick):
    x, y = sequences()
    if sick:
        x[:, 6:] = 0
    return dict(model=Former(), batch=(x, y))


@fault("NG40")
def repeated_samples(sick):
    x, y = vectors()
    return dict(model=mlp(), batch=(x[:8].repeat(8, 1), y[:8].repeat(8)) if sick else (x, y))


@fault("NG41")
def batches_sorted_by_class(sick):
    x, y = vectors(512)
    order = y.argsort() if sick else torch.randperm(512, generator=torch.Generator().manual_seed(0))
    return dict(model=mlp(), batch=(x, y), loader=DataLoader(TensorDataset(x[order], y[order]), 64))


@fault("NG42")
def no_decay_on_invariant_weights(sick):
    net = conv_net()
    return dict(
        model=net,
        batch=images(),
        optimizer=torch.optim.SGD(net.parameters() if sick else groups(net), lr=0.5, momentum=0.9),
    )


@fault("NG43")
def wide_layer_small_batch(sick):
    return dict(model=mlp(width=512 if sick else 16), batch=vectors(16))


@fault("NG44")
def gains_in_bfloat16(sick):
    net = Former(norm=RMS)
    x, y = sequences()
    if sick:
        net, x = net.bfloat16(), x.bfloat16()
    return dict(model=net, batch=(x, y), optimizer=torch.optim.AdamW(groups(net), lr=1e-4))


@fault("NG45")
def filter_by_name_misses_bn(sick):
    net = conv_net()
    bare = [p for n, p in net.named_parameters() if (n.endswith("bias") if sick else p.ndim < 2)]
    rest = [p for p in net.parameters() if all(p is not q for q in bare)]
    return dict(
        model=net,
        batch=images(),
        optimizer=torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]),
    )


@fault("NG45")
def filter_by_type_misses_custom_rms(sick):
    net = Former(norm=RMS)
    kept = [p for m in net.modules() if isinstance(m, nn.LayerNorm if sick else RMS) for p in m.parameters()]
    kept += [p for n, p in net.named_parameters() if n.endswith("bias")]
    rest = [p for p in net.parameters() if all(p is not q for q in kept)]
    return dict(
        model=net,
        batch=sequences(),
        optimizer=torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]),
    )


class Pair(nn.Module):
    """A student and a teacher that follows it."""

    def __init__(self, buffers):
        super().__init__()
        self.student = train(conv_net(), images(), steps=40)
        self.teacher = conv_net()
        for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            p.data.copy_(q.data)
            p.requires_grad_(False)
        if buffers:
            for p, q in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
                p.copy_(q)

    def forward(self, x):
        """Return both."""
        with torch.no_grad():
            self.teacher.eval()
            target = self.teacher(x)
        return self.student(x) + 0.0 * target


@fault("NG46")
def teacher_without_buffers(sick):
    return dict(model=Pair(buffers=not sick), batch=images())


@fault("NG47")
def norm_never_called(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm, self.head = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(F.relu(self.fc(x) if sick else self.norm(self.fc(x))))

    return dict(model=Net(), batch=vectors())


@fault("NG47")
def norm_result_is_dropped(sick):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm, self.head = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.fc(x)
            n = self.norm(h)
            return self.head(F.relu(h if sick else n))

    return dict(model=Net(), batch=vectors())


@fault("NG48")
def norm_over_the_batch_by_hand(sick):
    class Hand(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            axis = 0 if sick else -1
            return (
                self.weight
                * (x - x.mean(axis, keepdim=True))
                / (x.var(axis, keepdim=True, unbiased=False) + 1e-5).sqrt()
            )

    return dict(model=mlp(norm=Hand), batch=vectors())


@fault("NG49")
def averaged_spectral_vectors(sick):
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 4))
    if sick:
        p = net[0].parametrizations.weight[0]
        p._u.mul_(0.6)
        p._v.mul_(0.7)
    return dict(model=net, batch=vectors())


@fault("NG50")
def stream_explodes(sick):
    net = Former(depth=8, scale=40.0 if sick else 0.5)
    with torch.no_grad():
        for block in net.blocks:
            for name, p in block.named_parameters():
                if sick and name.startswith("fc2"):
                    p.mul_(3)
    return dict(model=net, batch=sequences())


@fault("NG51")
def pre_norm_without_last_norm(sick):
    return dict(model=Former(final=not sick), batch=sequences())


@fault("NG51")
def pre_norm_sequence_without_last_norm(sick):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    last = [] if sick else [nn.LayerNorm(16)]
    return dict(model=nn.Sequential(blocks, *last, nn.Flatten(), nn.Linear(160, 4)), batch=sequences())


# -- bugs that happened ------------------------------------------------------------------------------------------------


@fault("NG07", "torchvision MaxViT before vision#8312: momentum 0.99")
def maxvit_momentum(sick):
    torch.manual_seed(0)
    norm = lambda w: nn.BatchNorm2d(w, eps=1e-3, momentum=0.99 if sick else 0.01)  # noqa: E731
    return dict(model=train(conv_net(norm=norm), images(), steps=5), batch=images())


@fault("NG05", "Lightning#14866: SWA sets momentum to 0.0 while it recomputes statistics")
def lightning_swa(sick):
    net = train(conv_net(), images())
    for i in (1, 4):
        net[i].reset_running_stats()
        net[i].momentum = 0.0 if sick else None
    with torch.no_grad():
        for seed in range(4):
            net(images(seed=seed)[0])
    return dict(model=net, batch=images())


@fault("NG02", "opacus#567: BatchNorm1d replaced by GroupNorm(C, C) on vectors")
def opacus_fix(sick):
    return dict(model=train(mlp(norm=lambda w: nn.GroupNorm(w if sick else 4, w)), vectors(), steps=5), batch=vectors())


@fault("NG03", "virtex#16: linear evaluation with a backbone whose statistics move")
def virtex_linear_eval(sick):
    net = train(conv_net(), images())
    for p in net[:-1].parameters():
        p.requires_grad_(False)
    if not sick:
        net[1], net[4] = Frozen(net[1]), Frozen(net[4])
    return dict(model=net.train(), batch=images(), optimizer=torch.optim.SGD(net[-1].parameters(), lr=0.1))


@fault("NG28", "pytorch#197539: fusing a convolution that another path uses")
def fx_fuse(sick):
    return conv_used_with_and_without_norm(sick)


@fault("NG45", "transformers before #35927: only nn.LayerNorm is left out of decay")
def hf_decay_filter(sick):
    return filter_by_type_misses_custom_rms(sick)


@fault("NG45", "transformers after #35927: names like norm1 and bn1 are still decayed")
def hf_decay_names(sick):
    net = conv_net()
    import re

    keep = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|bias")
    bare = [p for n, p in net.named_parameters() if (keep.search(n) if sick else p.ndim < 2)]
    rest = [p for p in net.parameters() if all(p is not q for q in bare)]
    return dict(
        model=net,
        batch=images(),
        optimizer=torch.optim.AdamW(
            [
                {"params": rest, "weight_decay": 0.1},
                {"params": bare or [nn.Parameter(torch.zeros(1))], "weight_decay": 0.0},
            ]
        ),
    )


@fault("NG11", "diffusers#13316: a hand-written norm in float16")
def half_norm(sick):
    return rms_in_half_precision(sick)


@fault("NG04", "Lightning#15063: BaseFinetuning.freeze switches tracking off and leaves the statistics")
def lightning_freeze(sick):
    net = train(conv_net(), images())
    for i in (1, 4):
        net[i].track_running_stats = not sick
    return dict(model=net, batch=images())


@fault("NG49", "miles-credit#394: a moving average averages the vectors of spectral norm")
def ema_spectral(sick):
    torch.manual_seed(0)
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 4))
    mean = AveragedModel(net, use_buffers=sick)
    for _ in range(4):
        nn.init.normal_(net[0].parametrizations.weight.original)
        train(net, vectors(), steps=3)
        mean.update_parameters(net)
    return dict(model=mean, batch=vectors())


@fault("NG30", "llm-foundry#1745: norms drawn like weights after a meta-device start")
def meta_device(sick):
    net = Former(norm=RMS)
    if sick:
        for m in net.modules():
            if isinstance(m, RMS):
                nn.init.normal_(m.weight, 0, 0.02)
    return dict(model=net, batch=sequences())


@fault("NG44", "flame#47: RMSNorm gains that stay at one in bfloat16")
def flame_gains(sick):
    return gains_in_bfloat16(sick)


@fault("NG21", "CycleGAN#395: InstanceNorm with running statistics")
def cyclegan(sick):
    return instance_norm_tracks(sick)


def copies(arguments):
    """Return arguments whose model may be looked at again."""
    return {**arguments, "model": copy.deepcopy(arguments["model"])}
