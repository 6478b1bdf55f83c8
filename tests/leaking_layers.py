"""Layers under innocent names, put into a tiny model: those that leak between the samples of a packed row, and those
that do not."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """In place of a feed-forward block: it still runs, and something is added to what it was given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *args, **kwargs):
        return self.inner(x + self.more(x), *args, **kwargs)

    def more(self, x):
        return self.part(x)


class Smooth(nn.Module):
    """A short causal convolution, written by hand."""

    def forward(self, x):
        return functional.pad(x, (0, 0, 1, 0))[:, :-1] * 0.5


class Sum(nn.Module):
    """A running mean."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None].to(x)


class Centre(nn.Module):
    """What comes later is seen: the mean over the row."""

    def forward(self, x):
        return -x.mean(1, keepdim=True)


class Clock(nn.Module):
    """Places are counted along the row."""

    def forward(self, x):
        return (torch.arange(x.shape[1])[None, :, None] / 8).sin().to(x) * x


class Gate(nn.Module):
    """Places are counted by a cumulative mask of the tokens that are not 0."""

    def forward(self, x):
        place = (x.abs().sum(-1, keepdim=True) > 0).cumsum(1)
        return x * (place / 8).cos().to(x)


class Scale(nn.Module):
    """Every token for itself."""

    def forward(self, x):
        return x * x.abs().mean(-1, keepdim=True).rsqrt()


class Table(nn.Module):
    """A table along the row, as models make it that read it by `position_ids` afterwards."""

    def forward(self, x):
        return torch.arange(x.shape[1])[None, :, None].to(x).expand(x.shape)


class Unused(nn.Module):
    """Has such a table and reads one row of it."""

    def __init__(self):
        super().__init__()
        self.table = Table()

    def forward(self, x):
        return x + 0.1 * self.table(x)[:, 3:4]


class Keeper(nn.Module):
    """Draws at random, in evaluation too, and keeps numbers, buffers and tensors of what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("swapped", torch.zeros(3))
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.new = x
        self.seen += 1
        self.swapped = self.swapped + 1
        return x * 1e-9 * torch.rand_like(x)


LEAKING = {"Smooth": Smooth, "Sum": Sum, "Centre": Centre, "Clock": Clock, "Gate": Gate}
HARMLESS = {"Scale": Scale, "Unused": Unused, "Keeper": Keeper}


def put(model, part, layer=1):
    """`part` into the feed-forward block of a layer."""
    block = Block(model.model.layers[layer].mlp)
    block.part = part
    model.model.layers[layer].mlp = block
    return model
