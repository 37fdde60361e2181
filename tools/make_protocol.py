"""Writes kvjax/client/runtime.binpb, the compiled form of runtime.proto, from which servers and clients make their
message types.

    python tools/make_protocol.py [FILE]

Needs grpcio-tools, which the extra `test` brings. A test fails if the committed file is not what this writes.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "serving" / "server" / "proto"


def main(target: Path) -> None:
    arguments = [f"--proto_path={PROTO}", f"--descriptor_set_out={target}", "kvjax/v1/runtime.proto"]
    if protoc.main(["protoc", *arguments]):
        sys.exit(f"{PROTO} could not be compiled")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "kvjax" / "client" / "runtime.binpb")
