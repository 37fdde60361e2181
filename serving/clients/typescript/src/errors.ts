/** What can go wrong with a session: the same types as in kvjax.client. Each names the gRPC status by which it travels. */

import { type ServiceError, status } from "@grpc/grpc-js";

/**
 * The base of all. code: the name of the gRPC status. field: the field of the call that is wrong, "" for none. reason: for an ended
 * session, how it ended: "close", "ttl", "lru" or "failed", or "unknown" if no such session is remembered; else "".
 */
export class SessionError extends Error {
  readonly code: string = "INTERNAL";

  constructor(
    message: string,
    readonly field = "",
    readonly reason = "",
  ) {
    super(message);
    this.name = new.target.name;
  }
}

/** There is no such session (any more). It never comes back by itself: create a new one. */
export class SessionNotFound extends SessionError {
  override readonly code = "NOT_FOUND";
}

/** The session is not in the state that the call needs, or an invariant was violated, which closes it. */
export class FailedPrecondition extends SessionError {
  override readonly code = "FAILED_PRECONDITION";
}

/** Too little memory, too many sessions, or a limit of the server. */
export class ResourceExhausted extends SessionError {
  override readonly code = "RESOURCE_EXHAUSTED";
}

/** A field of the call has a wrong value. */
export class InvalidArgument extends SessionError {
  override readonly code = "INVALID_ARGUMENT";
}

/** The call was cancelled, or its session was closed meanwhile. */
export class Cancelled extends SessionError {
  override readonly code = "CANCELLED";
}

/** The call took longer than it was allowed to. */
export class DeadlineExceeded extends SessionError {
  override readonly code = "DEADLINE_EXCEEDED";
}

/** The server is not there, or is shutting down. */
export class Unavailable extends SessionError {
  override readonly code = "UNAVAILABLE";
}

/** The bearer token is missing or wrong. */
export class Unauthenticated extends SessionError {
  override readonly code = "UNAUTHENTICATED";
}

const BY_CODE = new Map<number, new (message: string, field?: string, reason?: string) => SessionError>([
  [status.NOT_FOUND, SessionNotFound],
  [status.FAILED_PRECONDITION, FailedPrecondition],
  [status.RESOURCE_EXHAUSTED, ResourceExhausted],
  [status.INVALID_ARGUMENT, InvalidArgument],
  [status.CANCELLED, Cancelled],
  [status.DEADLINE_EXCEEDED, DeadlineExceeded],
  [status.UNAVAILABLE, Unavailable],
  [status.UNAUTHENTICATED, Unauthenticated],
]);

/** The typed error of a failed call. Anything that is no status of gRPC stays what it is. */
export function errorOf(failed: unknown): unknown {
  if (!(failed instanceof Error) || typeof (failed as ServiceError).code !== "number" || !("metadata" in failed)) {
    return failed;
  }
  const { code, details, metadata } = failed as ServiceError;
  const said = (key: string) => String(metadata?.get(key)[0] ?? "");
  return new (BY_CODE.get(code) ?? SessionError)(details || failed.message, said("kvjax-field"), said("kvjax-reason"));
}
