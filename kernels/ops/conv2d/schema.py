"""What a conv2d problem is made of: its schema, the geometry that follows from it, and its tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.problem import Dim, Option, OptionValue, Problem, ProblemSchema

LAYOUTS = ("nchw", "nhwc")


def output_extent(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Output elements along one axis, as torch counts them; 0 or less where the kernel does not fit."""
    return (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1


class Conv2dSchema(ProblemSchema):
    """The schema of conv2d: besides each value alone, the values must fit each other."""

    __slots__ = ()

    def problem(
        self,
        *,
        dtype: str = "float32",
        allow_tf32: bool = False,
        threads: int = 0,
        **values: OptionValue,
    ) -> Problem:
        """Validate values given by name, fill the defaults in, and return the problem.

        Raises:
            InvalidProblemError: an unknown, missing or impossible value; channels that the groups do not divide; or a
                kernel larger than the padded input.
        """
        built = super().problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
        groups = built["groups"]
        for name, what in (("c", "input"), ("k", "output")):
            if built[name] % groups:
                raise InvalidProblemError(
                    f"conv2d: groups is {groups}, which does not divide {name} = {built[name]} ({what} channels). "
                    "Choose groups that divide both c and k."
                )
        for axis, kernel, what in (("h", "r", "rows"), ("w", "s", "columns")):
            size, pad, dilation = built[axis], built[f"pad_{axis}"], built[f"dil_{axis}"]
            if output_extent(size, built[kernel], 1, pad, dilation) < 1:
                raise InvalidProblemError(
                    f"conv2d: the kernel spans {dilation * (built[kernel] - 1) + 1} {what} ({kernel} = {built[kernel]}, "
                    f"dil_{axis} = {dilation}) and the padded input has {size + 2 * pad} ({axis} = {size}, "
                    f"pad_{axis} = {pad}), so there is no output. Enlarge {axis} or pad_{axis}, or shrink the kernel."
                )
        return built


CONV2D = Conv2dSchema(
    operation="conv2d",
    dims=(
        Dim("n", "images"),
        Dim("c", "input channels", minimum=1),
        Dim("h", "input rows", minimum=1),
        Dim("w", "input columns", minimum=1),
        Dim("k", "output channels", minimum=1),
        Dim("r", "kernel rows", minimum=1),
        Dim("s", "kernel columns", minimum=1),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option("stride_h", "rows between outputs", default=1, minimum=1),
        Option("stride_w", "columns between outputs", default=1, minimum=1),
        Option("pad_h", "rows of zeros above and below", default=0),
        Option("pad_w", "columns of zeros left and right", default=0),
        Option("dil_h", "rows between the kernel's taps", default=1, minimum=1),
        Option("dil_w", "columns between the kernel's taps", default=1, minimum=1),
        Option("groups", "independent groups of channels", default=1, minimum=1),
        Option(
            "layout",
            "of input, weight and output in memory: nchw is torch's contiguous, nhwc its channels_last",
            default="nchw",
            choices=LAYOUTS,
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A conv2d problem's sizes, and those that follow from them. Pairs are (rows, columns).

    Attributes:
        n, c, h, w, k, r, s: as in the problem.
        p, q: output rows and columns.
        stride, pad, dilation: elements.
        groups: independent groups of channels.
        channels_last: whether tensors are stored as nhwc.
        extent: rows and columns that the dilated kernel spans.
        padded: input rows and columns with their zeros.
        element_bytes: bytes of one element.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    p: int
    q: int
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    channels_last: bool
    extent: tuple[int, int]
    padded: tuple[int, int]
    element_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> Geometry:
        """The geometry of a conv2d problem."""
        n, c, h, w, k, r, s = (problem[name] for name in ("n", "c", "h", "w", "k", "r", "s"))
        stride = (problem["stride_h"], problem["stride_w"])
        pad = (problem["pad_h"], problem["pad_w"])
        dilation = (problem["dil_h"], problem["dil_w"])
        return cls(
            n=n,
            c=c,
            h=h,
            w=w,
            k=k,
            r=r,
            s=s,
            p=output_extent(h, r, stride[0], pad[0], dilation[0]),
            q=output_extent(w, s, stride[1], pad[1], dilation[1]),
            stride=stride,
            pad=pad,
            dilation=dilation,
            groups=problem["groups"],
            channels_last=problem["layout"] == "nhwc",
            extent=(dilation[0] * (r - 1) + 1, dilation[1] * (s - 1) + 1),
            padded=(h + 2 * pad[0], w + 2 * pad[1]),
            element_bytes=problem.element_bytes,
        )

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return self.r * self.s

    @property
    def group_channels(self) -> int:
        """Input channels that one output channel reads."""
        return self.c // self.groups

    @property
    def reduction(self) -> int:
        """Products that are summed to one output element."""
        return self.group_channels * self.taps

    @property
    def depthwise(self) -> bool:
        """Whether each output channel reads a single input channel."""
        return self.groups == self.c

    @property
    def input_bytes(self) -> float:
        """Bytes of the input."""
        return float(self.element_bytes) * self.n * self.c * self.h * self.w

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weight."""
        return float(self.element_bytes) * self.k * self.reduction

    @property
    def output_bytes(self) -> float:
        """Bytes of the output."""
        return float(self.element_bytes) * self.n * self.k * self.p * self.q

    @property
    def flops(self) -> float:
        """Operations of the definition: a multiplication and an addition a product, without padding."""
        return 2.0 * self.n * self.k * self.p * self.q * self.reduction

    @property
    def traffic_bytes(self) -> float:
        """Compulsory traffic: input and weight read once, output written once."""
        return self.input_bytes + self.weight_bytes + self.output_bytes


#: How much larger the rounding errors of Winograd's F(4x4, 3x3) are than the definition's: the terms that it adds up to
#: its worst output, over those of the definition (root mean squares for standard normal data). It follows from the
#: transforms, and a test derives it. F(2x2, 3x3) has 1.7.
WINOGRAD_AMPLIFICATION = 31.5


def convolution_tolerance(problem: Problem) -> Tolerance:
    """The tolerance of conv2d on standard normal data, for every way to compute it.

    With L products an output, of which the sum has standard deviation sqrt(L), and u the unit roundoff of float32:

    * One running sum: errors up to u times the partial sums, L of them near sqrt(L): u * L, and 8 for the largest of
      many elements (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
      41, 2019).
    * FFT: errors relative to the norms of a tile and the kernel, spread evenly, so that they grow with sqrt(L) and the
      logarithm of the transform (Schatzman, "Accuracy of the discrete Fourier transform and the fast Fourier
      transform", SIAM J. Sci. Comput. 17, 1996): 48 for that and for the largest element.
    * Winograd F(4x4, 3x3), by whichever library: the errors of a sum over the channels, amplified by the transforms
      (Barabasz et al., "Error analysis and improving the accuracy of Winograd convolution for deep neural networks",
      ACM Trans. Math. Softw. 46, 2020).

    16-bit outputs are rounded once, and libraries may keep split sums in 16 bits; TF32 rounds the inputs to 11 bits.
    """
    geometry = Geometry.of(problem)
    length, root = float(geometry.reduction), math.sqrt(geometry.reduction)
    units = 8.0 * length + 48.0 * root
    if (geometry.r, geometry.s) == (3, 3) and geometry.stride == geometry.dilation == (1, 1):
        units = max(units, WINOGRAD_AMPLIFICATION * (length + 48.0 * root))
    stored = UNIT_ROUNDOFF[problem.dtype]
    coarse = UNIT_ROUNDOFF["tf32"] if problem.allow_tf32 else stored if problem.element_bytes == 2 else 0.0
    return Tolerance(relative=4.0 * stored, absolute=UNIT_ROUNDOFF["float32"] * units + 8.0 * coarse * root)
