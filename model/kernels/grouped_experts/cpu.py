"""The grouped expert MLP on a CPU, with MXFP4 experts packed into the tiles of `cpu/gemm.h`.

A token's bits depend on its row, its choices and the weights alone, never on the other tokens or on the threads.
Without a gradient nothing but the packed bytes is read; with one, the forward is the same kernel, and the backward is
that of `eager.py` on dequantized views of the same bytes.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token, N = T K sorted rows; a matrix is
[O outputs, I inputs] in S strips of 16 outputs and B = I / 32 blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load
from model.kernels.grouped_experts.eager import experts_backward, make_unit, sort_rows
from model.kernels.grouped_experts.reference import Clamp
from model.mxfp4 import BLOCK, BLOCK_BYTES, check_packed, dequantize

_SOURCE = Path(__file__).with_name("cpu.cpp")
_STRIP = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_Views = Sequence[torch.Tensor | None]


class _NativeMatrix(ctypes.Structure):
    """`PackedMxfp4` of `cpu/packed_mxfp4.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "extreme")),
        *((name, ctypes.c_int64) for name in ("num_matrices", "columns", "strips", "blocks")),
    )


class _NativeLayer(ctypes.Structure):
    """`Layer` of cpu.cpp."""

    _fields_ = (
        *((name, _NativeMatrix) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias", "x", "chosen", "weights")),
        *((name, ctypes.c_void_p) for name in ("out", "hidden", "rows")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_ranks")),
        *((name, ctypes.c_int32) for name in ("dtype", "clamped")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMatrix:
    """E matrices of one shape, MXFP4, in strips of sixteen outputs."""

    codes_ESB: torch.Tensor
    """uint8 [E, S, B, 256]."""
    scales_ESB: torch.Tensor
    """uint8 [E, S, B, 16]."""
    extreme_ES: torch.Tensor
    """uint8: 1 where a block that is not zero has a scale byte outside 2..252, or one is NaN; multiplied in fp32."""
    num_outputs: int

    @property
    def num_matrices(self) -> int:
        """E."""
        return self.codes_ESB.shape[0]

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.codes_ESB.shape[2] * BLOCK

    @property
    def num_bytes(self) -> int:
        """All memory of it."""
        return sum(tensor.numel() for tensor in (self.codes_ESB, self.scales_ESB, self.extreme_ES))

    def split(self) -> list[PackedMatrix]:
        """Each expert's matrix as one of its own, in the same memory."""
        parts = (tensor.split(1) for tensor in (self.codes_ESB, self.scales_ESB, self.extreme_ES))
        return [
            PackedMatrix(codes_ESB=codes, scales_ESB=scales, extreme_ES=extreme, num_outputs=self.num_outputs)
            for codes, scales, extreme in zip(*parts, strict=True)
        ]

    def native(self) -> _NativeMatrix:
        """Where it lies; valid while this object lives."""
        num_matrices, strips, blocks, _ = self.codes_ESB.shape
        pointers = (tensor.data_ptr() for tensor in (self.codes_ESB, self.scales_ESB, self.extreme_ES))
        return _NativeMatrix(*pointers, num_matrices, self.num_outputs, strips, blocks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedExperts:
    """The experts of one layer as the kernel reads them."""

    gate_up: PackedMatrix
    """F gate outputs, then F up outputs, of D inputs."""
    down: PackedMatrix
    """D outputs of F inputs."""
    gate_up_bias_E2F: torch.Tensor | None
    """fp32."""
    down_bias_ED: torch.Tensor | None
    """fp32."""

    @property
    def num_bytes(self) -> int:
        """All memory of them."""
        biases = (self.gate_up_bias_E2F, self.down_bias_ED)
        return self.gate_up.num_bytes + self.down.num_bytes + sum(0 if b is None else b.nbytes for b in biases)


class GroupedExperts:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        library = load(_SOURCE, isa)
        self._pack, self._unpack = library.pack_mxfp4, library.unpack_mxfp4
        self._pack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_NativeMatrix)]
        self._unpack.argtypes = [ctypes.POINTER(_NativeMatrix), ctypes.c_void_p, ctypes.c_void_p]
        self._pack.restype = self._unpack.restype = None
        self._run, self._linear = library.grouped_experts, library.mxfp4_linear
        self._run.argtypes = [ctypes.POINTER(_NativeLayer)]
        self._combine = library.combine_rows
        self._combine.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3]
        self._combine.restype = None
        self._linear.argtypes = [ctypes.c_void_p, ctypes.POINTER(_NativeMatrix), ctypes.c_void_p]
        self._linear.argtypes += [ctypes.c_int64, ctypes.c_int32]

    def pack_matrix(self, blocks: torch.Tensor, scales: torch.Tensor) -> PackedMatrix:
        """Pack uint8 [(E,) O, I/32, 16] and [(E,) O, I/32].

        Raises:
            MXFP4Error: The two do not belong together.
            KernelError: They are not matrices.
        """
        check_packed("grouped_experts", blocks, scales)
        if scales.ndim not in (2, 3):
            raise KernelError(
                f"grouped_experts: scales must be [E, O, I/32] or [O, I/32], got {tuple(scales.shape)}; "
                "pass the experts of one layer"
            )
        blocks, scales = blocks.contiguous(), scales.contiguous()
        num_outputs, num_blocks = scales.shape[-2:]
        num_matrices, strips = len(scales) if scales.ndim == 3 else 1, -(-num_outputs // _STRIP)
        packed = PackedMatrix(
            codes_ESB=torch.empty(num_matrices, strips, num_blocks, _STRIP * BLOCK_BYTES, dtype=torch.uint8),
            scales_ESB=torch.empty(num_matrices, strips, num_blocks, _STRIP, dtype=torch.uint8),
            extreme_ES=torch.empty(num_matrices, strips, dtype=torch.uint8),
            num_outputs=num_outputs,
        )
        self._pack(blocks.data_ptr(), scales.data_ptr(), packed.native())
        return packed

    def unpack_matrix(self, packed: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes that were packed: uint8 [E, O, I/32, 16] and [E, O, I/32]."""
        scales = torch.empty(packed.num_matrices, packed.num_outputs, packed.num_inputs // BLOCK, dtype=torch.uint8)
        blocks = torch.empty(*scales.shape, BLOCK_BYTES, dtype=torch.uint8)
        self._unpack(packed.native(), blocks.data_ptr(), scales.data_ptr())
        return blocks, scales

    def pack(
        self,
        gate_up_blocks: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down_blocks: torch.Tensor,
        down_scales: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> PackedExperts:
        """Pack one layer's experts.

        Args:
            gate_up_blocks: uint8 [E, 2F, D/32, 16], F gate rows first.
            gate_up_scales: uint8 [E, 2F, D/32].
            down_blocks: uint8 [E, D, F/32, 16].
            down_scales: uint8 [E, D, F/32].
            gate_up_bias: [E, 2F], or `None`.
            down_bias: [E, D], or `None`.

        Raises:
            MXFP4Error: Blocks and scales do not belong together.
            KernelError: Shapes that are not those of one layer.
        """
        gate_up, down = (
            self.pack_matrix(blocks, scales)
            for blocks, scales in ((gate_up_blocks, gate_up_scales), (down_blocks, down_scales))
        )
        experts, dim, hidden = down.num_matrices, down.num_outputs, down.num_inputs
        shapes = [None if bias is None else tuple(bias.shape) for bias in (gate_up_bias, down_bias)]
        if (gate_up.num_matrices, gate_up.num_outputs, gate_up.num_inputs) != (experts, 2 * hidden, dim) or any(
            shape not in (None, expected)
            for shape, expected in zip(shapes, ((experts, 2 * hidden), (experts, dim)), strict=True)
        ):
            raise KernelError(
                f"grouped_experts: gate_up [E, 2F, D] and down [E, D, F] with their biases must be of one layer, got "
                f"{gate_up.num_matrices, gate_up.num_outputs, gate_up.num_inputs}, {experts, dim, hidden}, "
                f"{shapes[0]} and {shapes[1]}; pass the tensors of one layer"
            )
        biases = (None if b is None else b.detach().float().contiguous() for b in (gate_up_bias, down_bias))
        gate_up_bias_E2F, down_bias_ED = biases
        return PackedExperts(gate_up=gate_up, down=down, gate_up_bias_E2F=gate_up_bias_E2F, down_bias_ED=down_bias_ED)

    def dequantize(
        self, packed: PackedExperts, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] in fp32 or bf16."""
        return (
            dequantize(*self.unpack_matrix(packed.gate_up), dtype),
            dequantize(*self.unpack_matrix(packed.down), dtype),
        )

    def multiply(self, x_TI: torch.Tensor, packed: PackedMatrix) -> torch.Tensor:
        """fp32 [T, O] of one packed matrix; no gradient.

        Raises:
            KernelError: More matrices than one, other dtypes than fp32 and bf16, or rows of another length.
        """
        if packed.num_matrices != 1 or x_TI.dtype not in _DTYPES or x_TI.shape[1:] != (packed.num_inputs,):
            raise KernelError(
                f"grouped_experts: a product takes fp32 or bf16 [T, {packed.num_inputs}] and one matrix, got "
                f"{x_TI.dtype} {tuple(x_TI.shape)} and {packed.num_matrices}; pack a single matrix for it"
            )
        x_TI = x_TI.contiguous()
        out_TO = torch.empty(len(x_TI), packed.num_outputs)
        _check(
            self._linear(x_TI.data_ptr(), packed.native(), out_TO.data_ptr(), len(x_TI), _DTYPES[x_TI.dtype]), packed
        )
        return out_TO

    def __call__(
        self,
        x_TD: torch.Tensor,
        packed: PackedExperts,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        clamp: Clamp | None = None,
        views: _Views | None = None,
        frozen: bool = False,
    ) -> torch.Tensor:
        """As `reference.experts_forward` of the dequantized matrices.

        Args:
            x_TD: fp32 or bf16. In bf16 the unit's output is rounded to bf16 once, before the down product.
            packed: The experts.
            chosen_TK: int64 expert indices.
            weights_TK: fp32 factor of each choice.
            clamp: The gated unit; `None` for SwiGLU.
            views: (gate_up_E2FD, down_EDF, gate_up_bias_E2F or `None`, down_bias_ED or `None`): what was packed, in the
                dtype of `x_TD`, where gradients go. Read by the backward alone.
            frozen: The experts take no gradient and need no views: the backward dequantizes them once more.

        Returns:
            fp32 [T, D].

        Raises:
            KernelError: Operands that do not fit the experts, an index that names no expert, or a gradient is wanted
                without views.
        """
        self._check(x_TD, packed, chosen_TK, weights_TK)
        wanted = (x_TD, weights_TK, *(views or ()))
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in wanted):
            if frozen:
                views = (None,) * 4
            elif views is None:
                raise KernelError(
                    "grouped_experts: a gradient needs the dequantized matrices, got no views; "
                    "pass them, or compute under torch.no_grad()"
                )
            return _PackedExperts.apply(  # pyright: ignore[reportReturnType]
                x_TD, weights_TK, *views, chosen_TK, packed, clamp, self
            )
        return self.forward(x_TD, packed, chosen_TK, weights_TK, clamp, None)

    def forward(
        self,
        x_TD: torch.Tensor,
        packed: PackedExperts,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        clamp: Clamp | None,
        keep: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """No gradient; operands that fit. `keep`: fp32 [N, 2F] and [N, D] of all sorted rows, to be filled with what
        enters the unit and what leaves the down product before its weight.
        """  # noqa: D205
        x_TD, chosen_TK, weights_TK = x_TD.contiguous(), chosen_TK.contiguous(), weights_TK.contiguous()
        out_TD = torch.empty(x_TD.shape, dtype=torch.float32)
        tensors = (packed.gate_up_bias_E2F, packed.down_bias_ED, x_TD, chosen_TK, weights_TK, out_TD)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*tensors, *(keep or (None, None)))]
        limit, alpha = clamp or (0.0, 0.0)
        layer = _NativeLayer(
            *(packed.gate_up.native(), packed.down.native(), *pointers, *chosen_TK.shape),
            *(_DTYPES[x_TD.dtype], clamp is not None, limit, alpha),
        )
        _check(self._run(layer), packed.gate_up)
        return out_TD

    def combine(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The layer's last step alone, with its bits: fp32 [T, D], the sum of each token's rows times their weights.

        Args:
            rows_ND: fp32 rows that leave the down product.
            row_TK: int64, the row of each choice.
            weights_TK: fp32 factor of each choice.

        Raises:
            KernelError: Operands that do not fit, or rows of a length that is not a multiple of 32.
        """
        dim = rows_ND.shape[-1]
        fits = (
            rows_ND.dtype == weights_TK.dtype == torch.float32
            and row_TK.dtype == torch.int64
            and row_TK.shape == weights_TK.shape
            and row_TK.numel() == len(rows_ND)
            and dim % BLOCK == 0
        )
        if not fits:
            raise KernelError(
                f"grouped_experts: rows must be fp32 [N, D] with D a multiple of {BLOCK}, their places int64 [T, K] "
                f"and the weights fp32 [T, K], got {rows_ND.dtype} {tuple(rows_ND.shape)}, {row_TK.dtype} "
                f"{tuple(row_TK.shape)} and {weights_TK.dtype} {tuple(weights_TK.shape)}; pass the rows of one layer"
            )
        operands = (rows_ND.contiguous(), row_TK.contiguous(), weights_TK.contiguous())
        out_TD = torch.empty(len(row_TK), dim)
        self._combine(*(tensor.data_ptr() for tensor in (*operands, out_TD)), *row_TK.shape, dim)
        return out_TD

    @staticmethod
    def _check(x_TD: torch.Tensor, packed: PackedExperts, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        fits = (
            x_TD.dtype in _DTYPES
            and x_TD.shape[1:] == (packed.down.num_outputs,)
            and chosen_TK.dtype == torch.int64
            and weights_TK.dtype == torch.float32
            and chosen_TK.ndim == 2
            and len(chosen_TK) == len(x_TD)
            and chosen_TK.shape == weights_TK.shape
        )
        if not fits:
            raise KernelError(
                f"grouped_experts: x must be fp32 or bf16 [T, {packed.down.num_outputs}], chosen int64 [T, K] and "
                f"weights fp32 [T, K], got {x_TD.dtype} {tuple(x_TD.shape)}, {chosen_TK.dtype} "
                f"{tuple(chosen_TK.shape)} and {weights_TK.dtype} {tuple(weights_TK.shape)}; convert them"
            )


def _check(code: int, packed: PackedMatrix) -> None:
    if code == 1:
        raise KernelError(
            f"grouped_experts: choices must lie in 0..{packed.num_matrices - 1}, got one outside; look at the router"
        )
    if code:
        raise MemoryError("grouped_experts: no memory for the sorted rows; compute fewer tokens at once")


class _PackedExperts(torch.autograd.Function):
    """The kernel forward; backward in torch."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        gate_up_E2FD: torch.Tensor | None,
        down_EDF: torch.Tensor | None,
        gate_up_bias_E2F: torch.Tensor | None,
        down_bias_ED: torch.Tensor | None,
        chosen_TK: torch.Tensor,
        packed: PackedExperts,
        clamp: Clamp | None,
        kernel: GroupedExperts,
    ) -> torch.Tensor:
        hidden_N2F = torch.empty(chosen_TK.numel(), packed.gate_up.num_outputs)
        out_ND = torch.empty(chosen_TK.numel(), packed.down.num_outputs)
        y_TD = kernel.forward(x_TD, packed, chosen_TK, weights_TK, clamp, (hidden_N2F, out_ND))
        ctx.save_for_backward(x_TD, hidden_N2F, out_ND, gate_up_E2FD, down_EDF, weights_TK, chosen_TK)
        ctx.packed, ctx.kernel = packed, kernel
        ctx.clamp, ctx.has_bias = clamp, (gate_up_bias_E2F is not None, down_bias_ED is not None)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TD,) = grads
        x_TD, hidden_N2F, out_ND, gate_up_E2FD, down_EDF, weights_TK, chosen_TK = ctx.saved_tensors
        if frozen := gate_up_E2FD is None:
            gate_up_E2FD, down_EDF = ctx.kernel.dequantize(ctx.packed, x_TD.dtype)
        rows = sort_rows(chosen_TK, len(down_EDF))
        unit = make_unit(ctx.clamp)
        h_N2F = hidden_N2F.to(x_TD.dtype)
        act_NF = unit.forward(h_N2F)
        x_ND = x_TD.index_select(0, rows.token_N)
        found = experts_backward(
            grad_TD, x_ND, h_N2F, act_NF, out_ND, gate_up_E2FD, down_EDF, weights_TK, rows, unit, ctx.has_bias
        )
        if frozen:
            return (found.x_TD, found.weights_TK, *[None] * 8)
        biases = (found.gate_up_bias_E2F, found.down_bias_ED)
        return (found.x_TD, found.weights_TK, found.gate_up_E2FD, found.down_EDF, *biases, *[None] * 4)
