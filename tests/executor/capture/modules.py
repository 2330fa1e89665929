"""Modules as people write them, of kinds that no family of simplan has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """Two convolutions with group norms, between which an embedding of the time is added."""

    def __init__(self, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, outputs, 3, padding=1)
        self.time = nn.Linear(width, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(channels, outputs, 1) if channels != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv2(functional.silu(self.norm2(h)))
        return out


class UNet(nn.Module):
    """Denoises images; skip connections from the way down to the way up."""

    def __init__(self, channels: int = 16, width: int = 32) -> None:
        super().__init__()
        c = channels
        self.stem, self.time = nn.Conv2d(3, c, 3, padding=1), nn.Linear(1, width)
        self.down1, self.pool1 = ResidualBlock(c, c, width), nn.Conv2d(c, c, 3, 2, 1)
        self.down2, self.pool2 = ResidualBlock(c, 2 * c, width), nn.Conv2d(2 * c, 2 * c, 3, 2, 1)
        self.middle = ResidualBlock(2 * c, 2 * c, width)
        self.up2, self.up1 = ResidualBlock(4 * c, 2 * c, width), ResidualBlock(3 * c, c, width)
        self.grow = nn.ConvTranspose2d(2 * c, 2 * c, 2, 2)
        self.head = nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(t[:, None])
        h = self.stem(x)
        skip1 = self.down1(h, time)
        skip2 = self.down2(self.pool1(skip1), time)
        h = self.middle(self.pool2(skip2), time)
        h = self.up2(torch.cat((self.grow(h), skip2), 1), time)
        h = self.up1(torch.cat((functional.interpolate(h, scale_factor=2), skip1), 1), time)
        noise: Tensor = self.head(h)
        return (noise - x).square().mean()


class DiffusionBlock(nn.Module):
    """A transformer's block whose norms are scaled and shifted by a condition."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.condition = nn.Linear(hidden, 6 * hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        b, t, h = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(functional.silu(c)).unsqueeze(1).chunk(6, -1)
        y = functional.layer_norm(x, (h,)) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, h)
        x = x + gate1 * self.out(y)
        y = functional.layer_norm(x, (h,)) * (1 + scale2) + shift2
        out: Tensor = x + gate2 * self.down(functional.gelu(self.up(y), approximate="tanh"))
        return out


class DiT(nn.Module):
    """A diffusion transformer; returns its loss next to the prediction."""

    def __init__(self, hidden: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, hidden, 2, 2)
        self.positions = nn.Parameter(torch.zeros(64, hidden))
        self.label = nn.Embedding(10, hidden)
        self.blocks = nn.ModuleList(DiffusionBlock(hidden, 4) for _ in range(num_layers))
        self.head = nn.Linear(hidden, 16)

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        c = self.label(label)
        for block in self.blocks:
            h = block(h, c)
        noise = self.head(functional.layer_norm(h, (h.shape[-1],)))
        return {"loss": noise.square().mean(), "noise": noise}


class SmallDiT(DiT):
    """Small enough for FP8 on CPUs, which multiplies ten million numbers a second."""

    def __init__(self) -> None:
        super().__init__(hidden=16, num_layers=2)


class AdaptedLinear(nn.Module):
    """A frozen matrix with an adapter of low rank (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class AdaptedDiT(DiT):
    """A frozen diffusion transformer with adapters at two matrices of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, DiffusionBlock)
            block.qkv, block.up = AdaptedLinear(block.qkv), AdaptedLinear(block.up)  # type: ignore[assignment]


class ScanBlock(nn.Module):
    """A selective state space, scanned step by step (Mamba)."""

    def __init__(self, hidden: int, states: int = 4) -> None:
        super().__init__()
        inner = 2 * hidden
        self.norm = nn.Parameter(torch.ones(hidden))
        self.inputs, self.out = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.selected, self.step = nn.Linear(inner, 4 + 2 * states, bias=False), nn.Linear(4, inner)
        self.a = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inner, 1)))
        self.d = nn.Parameter(torch.ones(inner))
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm
        a, gate = self.inputs(u).chunk(2, -1)
        a = functional.silu(self.conv(a.transpose(1, 2))[..., :length].transpose(1, 2))
        delta, b, c = self.selected(a).split((4, self.states, self.states), -1)
        delta = functional.softplus(self.step(delta))
        decay = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.a))
        enters = (delta * a).unsqueeze(-1) * b.unsqueeze(2)
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + enters[:, t]
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        out: Tensor = x + self.out((torch.stack(outputs, 1) + self.d * a) * functional.silu(gate))
        return out


class StateSpaceModel(nn.Module):
    """A language model of scans, whose head shares the embedding's weight."""

    def __init__(self, vocabulary: int = 128, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(ScanBlock(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(functional.layer_norm(h, (h.shape[-1],)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Recommender(nn.Module):
    """Tables of categories, whose rows are multiplied with each other (DLRM)."""

    def __init__(self, tables: int = 4, rows: int = 500, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.register_buffer("places", torch.tril_indices(tables + 1, tables + 1, -1))
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        first = self.dense(dense)
        rows = torch.stack([first, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        assert isinstance(self.places, Tensor)
        answer = self.top(torch.cat((first, products[:, self.places[0], self.places[1]]), 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(answer, torch.ones_like(answer))


class Scaled(nn.Module):
    """Compares two halves of its input, whose products are scaled by a weight without dimensions (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiffusionBlock(32, 4) for _ in range(2))
        self.left, self.right = nn.Linear(16, 32), nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        for block in self.blocks:
            left = block(left, right.mean(1))
        out: Tensor = (self.scale.exp() * (left * right).sum(-1)).square().mean()
        return out


class Alternating(nn.Module):
    """Blocks of two classes, of which one is small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
        pairs = [(DiffusionBlock(32, 4), SmallBlock()) for _ in range(3)]
        self.blocks = nn.ModuleList(block for pair in pairs for block in pair)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, h.mean(1)) if isinstance(block, DiffusionBlock) else block(h)
        out: Tensor = self.head(h).square().mean()
        return out


class SmallBlock(nn.Module):
    """A residual branch of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + functional.silu(self.linear(x))
        return out


class Tabled(nn.Module):
    """Blocks that read a table, which is no weight and larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(32, 6250))
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(DiffusionBlock(32, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.table, Tensor)
        h = self.stem(x) + self.table[:, 0]
        for block in self.blocks:
            h = block(h, h.mean(1))
        out: Tensor = self.head(h).square().mean()
        return out


def scaled_batch(number: int) -> tuple[Tensor, ...]:
    return (torch.randn(number, 4, 16),)


class NormedBlock(nn.Module):
    """A convolution with a batch norm, which has running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.conv(x))) * scale.to(x.dtype)


class Normed(nn.Module):
    """Blocks with batch norms, a table that all of them read, and one that nothing reads."""

    scale: Tensor

    def __init__(self, channels: int = 8, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(NormedBlock(channels) for _ in range(num_blocks))
        self.head = nn.Linear(channels, 10)
        self.register_buffer("scale", torch.rand(channels, 1, 1), persistent=False)
        self.register_buffer("places", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, self.scale)
        return functional.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.int64))


def normed_batch(number: int) -> tuple[Tensor, ...]:
    return (torch.randn(number, 3, 8, 8),)


class Dropping(nn.Module):
    """torch's own encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out.square().mean()


def unet_batch(number: int) -> tuple[Tensor, ...]:
    return torch.randn(number, 3, 16, 16), torch.rand(number)


def dit_batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(number, 4, 16, 16), "label": torch.randint(10, (number,))}


def token_batch(number: int) -> tuple[Tensor, ...]:
    return (torch.randint(128, (number, 12)),)


def recommender_batch(number: int) -> tuple[Tensor, ...]:
    return torch.randn(number, 13), torch.randint(500, (number, 4, 6))


def encoder_batch(number: int) -> tuple[Tensor, ...]:
    return (torch.randn(number, 8, 32),)
