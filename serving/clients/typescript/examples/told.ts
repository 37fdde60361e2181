/** What the user of an example reads of an error. */

import { SessionError, Unavailable } from "../src/index.js";

/** Print an error of a session, and let the process end with status 1. Rethrow any other. */
export function tell(program: string, error: unknown, address: string): void {
  if (!(error instanceof SessionError)) throw error;
  // gRPC's own message about a lost connection names its internals, so it is left out.
  const unavailable =
    error.reason === "ending"
      ? `the server at ${address} is ending, and takes no new call`
      : `there is no server at ${address}, or it has ended: start \`kvjax serve\`, or give its address`;
  console.error(`${program}: ${error instanceof Unavailable ? unavailable : error.message}`);
  process.exitCode = 1;
}
