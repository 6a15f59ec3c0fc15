"""How a weight matrix lies in device memory: units of 128 rows by 128 or 256 columns.

One or two row tiles are a band; the units of a band follow each other along the columns, tile by
tile. source/format.cu says what is in a unit. Here are the sizes, and in how many shares the units
of a matrix are given to blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.quant.formats import QuantType

ROWS = 128
X_COLS = 256  # activations are padded to whole units of any format
X_TILE_BYTES = 2176
# Left to the small kernels before and after a product, which then need not wait for its blocks.
_SPARE_SMS = 2
_MOST_SHARES = 8  # of a band: adding up more parts takes longer than what they save

# Columns of a unit; bits a weight with its group's scales; bytes a row for the whole unit.
_UNITS = {
    QuantType.Q4_0: (256, 4.5, 0),
    QuantType.Q4_1: (256, 5.0, 0),
    QuantType.Q5_0: (256, 5.5, 0),
    QuantType.Q5_1: (256, 6.0, 0),
    QuantType.Q8_0: (128, 8.5, 0),
    QuantType.Q4_K: (256, 4.5, 4),
    QuantType.Q5_K: (256, 5.5, 4),
    QuantType.Q6_K: (128, 6.5, 2),
    QuantType.F16: (128, 16.0, 0),
}


@dataclass(frozen=True)
class UnitFormat:
    """A device layout, named by the file format that it holds without loss."""

    qtype: QuantType
    cols: int

    @property
    def unit_bytes(self) -> int:
        _, bits, super_bytes = _UNITS[self.qtype]
        return ROWS * (int(self.cols * bits) // 8 + super_bytes)

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return (
            ("FORMAT", self.qtype.value),
            ("COLS", self.cols),
            ("HOST_UNIT_BYTES", self.unit_bytes),
        )


def unit_format(qtype: QuantType) -> UnitFormat:
    """The layout for a file format; those without one of their own become 16-bit floats."""
    kept = qtype if qtype in _UNITS else QuantType.F16
    return UnitFormat(kept, _UNITS[kept][0])


def stacked_format(qtypes: Iterable[QuantType]) -> UnitFormat | None:
    """The layout in which rows of all these formats can lie in one matrix, without loss."""
    forms = {unit_format(qtype) for qtype in qtypes}
    if {form.qtype for form in forms} == {QuantType.Q4_K, QuantType.Q5_K}:
        return unit_format(QuantType.Q5_K)
    return forms.pop() if len(forms) == 1 else None


def band_tiles(device: Gpu) -> int:
    """Row tiles that a block works on at once: two read activations half as often, if they fit."""
    return 2 if device.shared_per_block > 160_000 else 1


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix on a device; as 16-bit floats, rows are divided by row_scale."""

    format: UnitFormat
    num_rows: int
    num_cols: int
    units: torch.Tensor  # uint8 [bands, chunks, tiles of a band, unit_bytes]
    row_scale: torch.Tensor  # float32 [bands * tiles of a band * 128], powers of two
    is_plain: torch.Tensor  # int32 [1], whether every row_scale is 1
    num_shares: int  # fixed with the matrix: it decides in which order products are added up

    @property
    def num_bands(self) -> int:
        return self.units.shape[0]

    @property
    def band_tiles(self) -> int:
        return self.units.shape[2]

    @property
    def num_chunks(self) -> int:
        return self.units.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.units.numel() + 4 * self.row_scale.numel()


def new_matrix(form: UnitFormat, num_rows: int, num_cols: int, device: Gpu) -> PackedMatrix:
    """Room for a matrix. Rows are padded to whole bands, which nobody reads."""
    in_band = band_tiles(device)
    bands, chunks = -(-num_rows // (ROWS * in_band)), -(-num_cols // form.cols)
    spare = _SPARE_SMS if device.can_chain else 0  # elsewhere kernels never run side by side
    num_shares = min(bands * min(chunks, _MOST_SHARES), max(device.num_sms - spare, 1))
    if bands * chunks * num_shares >= 2**32:
        raise ValueError(f"a matrix of {num_rows} x {num_cols} is too large for the kernels")
    shape = (bands, chunks, in_band, form.unit_bytes)
    return PackedMatrix(
        form,
        num_rows,
        num_cols,
        torch.empty(shape, dtype=torch.uint8, device=device.place),
        torch.ones(bands * in_band * ROWS, dtype=torch.float32, device=device.place),
        torch.ones(1, dtype=torch.int32, device=device.place),
        num_shares,
    )


@dataclass(frozen=True)
class Activations:
    """Prepared activations of up to 8 * num_tiles tokens, as 16-bit floats."""

    halves: torch.Tensor  # uint8 [padded_cols / 128, num_tiles, 2176], see source/halves.cu
    token_scale: torch.Tensor  # float32 [8 * num_tiles], powers of two
    num_cols: int

    @property
    def num_tiles(self) -> int:
        return self.halves.shape[1]

    @property
    def padded_cols(self) -> int:
        return self.halves.shape[0] * 128


@dataclass(frozen=True)
class HalfRows:
    """Prepared activations of any number of tokens, for prefill."""

    halves: torch.Tensor  # float16 [tokens, padded_cols]
    token_scale: torch.Tensor  # float32 [tokens], powers of two
    num_cols: int

    @property
    def padded_cols(self) -> int:
        return self.halves.shape[1]


def new_activations(num_tokens: int, num_cols: int, gpu: Gpu) -> Activations:
    tiles, blocks = -(-num_tokens // 8), -(-num_cols // X_COLS) * X_COLS // 128
    place = gpu.place
    halves = torch.zeros((blocks, tiles, X_TILE_BYTES), dtype=torch.uint8, device=place)
    return Activations(halves, torch.zeros(tiles * 8, device=place), num_cols)


def new_half_rows(num_tokens: int, num_cols: int, gpu: Gpu) -> HalfRows:
    padded = -(-num_cols // X_COLS) * X_COLS
    halves = torch.empty((num_tokens, padded), dtype=torch.float16, device=gpu.place)
    return HalfRows(halves, torch.empty(num_tokens, device=gpu.place), num_cols)
