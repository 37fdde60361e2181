"""Functions of a float32 for the threads of `hopper.threads.lanes`: the hardware's approximations, and rounded products
and quotients."""

from __future__ import annotations

from pallas_kernels.hopper.threads import lanes
from pallas_kernels.hopper.threads.lanes import Scalar


def exp2(x: Scalar) -> Scalar:
    """2 to the x, to about 2 ulp."""
    return lanes.ptx("ex2.approx.ftz.f32 $0, $1;", x, result="f32")


def log2_approx(x: Scalar) -> Scalar:
    """Binary logarithm, error about 2^-22; -inf for 0."""
    return lanes.ptx("lg2.approx.ftz.f32 $0, $1;", x, result="f32")


def reciprocal(x: Scalar) -> Scalar:
    """1 / x, to about 1 ulp."""
    return lanes.ptx("rcp.approx.ftz.f32 $0, $1;", x, result="f32")


def sqrt(x: Scalar) -> Scalar:
    """Square root, to about 2 ulp."""
    return lanes.ptx("sqrt.approx.f32 $0, $1;", x, result="f32")


def rsqrt(x: Scalar) -> Scalar:
    """1 / sqrt(x), to about 2 ulp."""
    return lanes.ptx("rsqrt.approx.f32 $0, $1;", x, result="f32")


def multiply(a: Scalar, b: Scalar | float) -> Scalar:
    """a * b, rounded by itself. Without this, compilers may fuse a product and a sum into one rounding."""
    return lanes.ptx("mul.rn.f32 $0, $1, $2;", a, b if isinstance(b, Scalar) else lanes.f32(b), result="f32")


def divide(a: Scalar, b: Scalar) -> Scalar:
    """a / b, correctly rounded if b is a whole number below 2^24 and there is no overflow and no denormal
    (Markstein)."""
    guess = reciprocal(b)
    inverse = lanes.fma(lanes.fma(lanes.f32(0.0) - b, guess, 1.0), guess, guess)
    quotient = multiply(a, inverse)
    return lanes.fma(lanes.fma(lanes.f32(0.0) - quotient, b, a), inverse, quotient)


def quotient_of_xla(a: Scalar, b: Scalar) -> Scalar:
    """a / b to 2 ulp, by the instruction that XLA divides with: the same bits. b: not one that the compiler knows, else
    it may divide otherwise."""
    return lanes.ptx("div.full.f32 $0, $1, $2;", a, b, result="f32")


def inverse_of_xla(x: Scalar) -> Scalar:
    """1 / x to about 1 ulp, by the instruction that XLA takes for it: the same bits."""
    return lanes.ptx("rcp.approx.f32 $0, $1;", x, result="f32")


def truncated(x: Scalar) -> Scalar:
    """x without its fraction, as an integer; 0 for a NaN."""
    return lanes.ptx("cvt.rzi.s32.f32 $0, $1;", x, result="i32")


def nearest(x: Scalar) -> Scalar:
    """The nearest integer, the even one of two. The nearest that there is for numbers beyond 32 bits; 0 for a NaN."""
    return lanes.ptx("cvt.rni.s32.f32 $0, $1;", x, result="i32")
