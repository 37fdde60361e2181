"""Damages a GGUF file's bytes: at random, and where counts, types and lengths stand."""

import struct

import numpy as np

HUGE = (0, 1, 2, 3, 7, 255, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def damage(data, generator, header):
    """`data`, damaged in one of several ways. header: bytes that the header takes, where most damage is done."""
    made = bytearray(data)
    way = int(generator.integers(0, 8))
    if way == 0:
        return bytes(made[: int(generator.integers(0, len(made)))])
    if way == 1:
        return bytes(made[: int(generator.integers(0, header))])
    if way in (2, 3):  # a number of 8 or 4 bytes, at any place
        size, code = ((8, "<Q"), (4, "<I"))[way - 2]
        at = int(generator.integers(4, header - size))
        value = HUGE[int(generator.integers(0, len(HUGE)))] % 2 ** (8 * size)
        made[at : at + size] = struct.pack(code, value)
    elif way == 4:  # the counts themselves
        at = 8 + 8 * int(generator.integers(0, 2))
        made[at : at + 8] = struct.pack("<Q", HUGE[int(generator.integers(0, len(HUGE)))])
    elif way == 5:  # some bytes of the header
        for at in generator.integers(0, header, int(generator.integers(1, 40))):
            made[int(at)] = int(generator.integers(0, 256))
    elif way == 6:  # a piece taken out, or put in
        at, count = int(generator.integers(0, header)), int(generator.integers(1, 64))
        made[at : at + count * int(generator.integers(0, 2))] = generator.integers(0, 256, count, np.uint8).tobytes()
    else:  # anywhere
        for at in generator.integers(0, len(made), 20):
            made[int(at)] = int(generator.integers(0, 256))
    return bytes(made)
