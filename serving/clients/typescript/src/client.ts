/** The client: `Client`, `Session` and `Generation`, with the surface of kvjax.client.AsyncClient. */

import { type ClientReadableStream, Metadata, type ServiceError, credentials } from "@grpc/grpc-js";
import { setTimeout as sleep } from "node:timers/promises";

import { Cancelled, FailedPrecondition, SessionNotFound, Unavailable, errorOf } from "./errors.js";
import {
  type GenerateResponse,
  type RuntimeClient,
  type Sampling,
  checkedTokens,
  deadlineIn,
  runtimeService,
  samplingMessage,
} from "./wire.js";

/** Calls that may be sent again when the connection fails, because doing them twice does no more than doing them once. */
const REPEATABLE = new Set(["appendTokens", "closeSession", "getSessionInfo"]);
const FIRST_WAIT_MS = 100;

/** How a client reaches its server. */
export interface ClientOptions {
  /** Bearer token, where the server wants one. */
  token?: string;
  /** PEM of the certificate that signed the server's, for TLS; left out: no TLS. */
  rootCertificate?: Buffer;
  /** Deadline of each call but generations, in milliseconds. */
  timeoutMs?: number;
  /** How often a call is sent again when the connection fails, if that is safe. */
  retries?: number;
}

/** What `Session.info` tells. Counts of tokens, bytes on the device, and violations of each invariant in all sessions of the server. */
export interface SessionInfo {
  sessionId: string;
  historyTokens: number;
  cachedTokens: number;
  droppedTokens: number;
  kvLiveBytes: number;
  demoted: boolean;
  generating: boolean;
  policy: string;
  violations: Record<string, number>;
}

/** "stop": the last token is a stop token. */
export type FinishReason = "stop" | "length" | "cancelled";

/** A generation's options: how it is sampled, its deadline in milliseconds, and a signal that ends it with the error Cancelled. */
export type GenerateOptions = Sampling & { timeoutMs?: number; signal?: AbortSignal };

/** A connection to a server. All errors of calls are `SessionError`s. */
export class Client {
  readonly #grpc: RuntimeClient;
  readonly #metadata = new Metadata();
  readonly #timeoutMs: number;
  #closed = false;
  readonly retries: number;

  constructor(address = "127.0.0.1:50051", options: ClientOptions = {}) {
    const tls = options.rootCertificate;
    this.#grpc = new (runtimeService())(address, tls ? credentials.createSsl(tls) : credentials.createInsecure(), {
      "grpc.max_receive_message_length": -1,
      "grpc.initial_reconnect_backoff_ms": 100,
      "grpc.max_reconnect_backoff_ms": 2000,
    }) as unknown as RuntimeClient;
    if (options.token !== undefined) this.#metadata.set("authorization", `Bearer ${options.token}`);
    this.#timeoutMs = options.timeoutMs ?? 60_000;
    this.retries = options.retries ?? 5;
  }

  /** A new session with an initial history, possibly empty. policy: a decode policy of the server; left out: its first. */
  async createSession(tokenIds: readonly number[] = [], options: { policy?: string } = {}): Promise<Session> {
    const request = { tokenIds: checkedTokens(tokenIds), policy: options.policy ?? "" };
    const answer = await this.call<{ sessionId: string }>("createSession", request);
    return new Session(this, answer.sessionId, tokenIds.length);
  }

  /** The session of an id, for a client that did not create it. SessionNotFound. */
  async session(sessionId: string): Promise<Session> {
    const found = new Session(this, sessionId, 0);
    found.length = (await found.info()).historyTokens;
    return found;
  }

  /** Close the connection. Sessions live on, until they have been idle for too long. */
  close(): void {
    this.#closed = true;
    this.#grpc.close();
  }

  /** Send one request, again if the connection fails and that is safe. */
  async call<Answer>(name: string, request: unknown): Promise<Answer> {
    for (let attempt = 0; ; attempt++) {
      try {
        return await this.#once<Answer>(name, request);
      } catch (error) {
        if (name === "closeSession" && attempt > 0 && error instanceof SessionNotFound && error.reason === "close") {
          return {} as Answer; // an earlier attempt, whose answer was lost, has closed it
        }
        if (!REPEATABLE.has(name) || !(error instanceof Unavailable) || attempt >= this.retries) throw error;
      }
      await sleep(FIRST_WAIT_MS * 2 ** attempt);
    }
  }

  /** Begin a Generate. */
  stream(request: unknown, timeoutMs: number | undefined): ClientReadableStream<GenerateResponse> {
    this.#stillOpen();
    const options = timeoutMs === undefined ? {} : deadlineIn(timeoutMs);
    return this.#grpc.generate!(request, this.#metadata, options) as ClientReadableStream<GenerateResponse>;
  }

  #stillOpen(): void {
    if (this.#closed) throw new FailedPrecondition("this client was closed: make another");
  }

  #once<Answer>(name: string, request: unknown): Promise<Answer> {
    return new Promise((resolve, reject) => {
      this.#stillOpen();
      const options = deadlineIn(this.#timeoutMs);
      this.#grpc[name]!(request, this.#metadata, options, (failed: ServiceError | null, answer: Answer) => {
        if (failed) reject(errorOf(failed));
        else resolve(answer);
      });
    });
  }
}

/**
 * One session of a server. length: of its history, as far as this client knows; calls fail where the server knows otherwise, so that two
 * clients that share a session notice.
 */
export class Session {
  readonly #client: Client;

  constructor(
    client: Client,
    readonly id: string,
    public length: number,
  ) {
    this.#client = client;
  }

  /** Add tokens to the history, and return its length. */
  async append(tokenIds: readonly number[]): Promise<number> {
    const request = { sessionId: this.id, tokenIds: checkedTokens(tokenIds), at: this.length };
    this.length = (await this.#client.call<{ historyTokens: number }>("appendTokens", request)).historyTokens;
    return this.length;
  }

  /**
   * Generate tokens, as an asynchronous iterable of ids. They join the history when the iteration ends. Where it is broken off, those that
   * were iterated over do; if the server had finished by then, all of them (`length` counts them).
   */
  generate(options: GenerateOptions = {}): Generation {
    return new Generation(this.#client, this, options);
  }

  /** A second session with the same history. */
  async fork(): Promise<Session> {
    const answer = await this.#client.call<{ sessionId: string }>("forkSession", { sessionId: this.id });
    return new Session(this.#client, answer.sessionId, this.length);
  }

  /** What the server knows of the session. */
  async info(): Promise<SessionInfo> {
    const answer = await this.#client.call<Omit<SessionInfo, "sessionId">>("getSessionInfo", { sessionId: this.id });
    return { ...answer, sessionId: this.id };
  }

  /** End the session. Its pages are free when this returns. */
  async close(): Promise<void> {
    await this.#client.call("closeSession", { sessionId: this.id });
  }
}

/** The tokens of one generation. finishReason and the counts are known at the end. */
export class Generation implements AsyncIterable<number> {
  /** All tokens that have arrived. */
  readonly tokens: number[] = [];
  finishReason: FinishReason | null = null;
  prefillTokens = 0;
  droppedTokens = 0;
  historyTokens = 0;
  readonly #client: Client;
  readonly #session: Session;
  readonly #request: unknown;
  readonly #timeoutMs: number | undefined;
  readonly #signal: AbortSignal | undefined;
  #begun = false;

  constructor(client: Client, session: Session, { timeoutMs, signal, ...sampling }: GenerateOptions) {
    this.#client = client;
    this.#session = session;
    this.#request = { sessionId: session.id, at: session.length, sampling: samplingMessage(sampling) };
    this.#timeoutMs = timeoutMs;
    this.#signal = signal;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<number, void, void> {
    if (this.#begun) throw new Error("a generation can be iterated over once: call generate again for more tokens");
    this.#begun = true;
    let given = 0;
    for (let attempt = 0; ; attempt++) {
      if (this.#signal?.aborted) throw new Cancelled("the call was cancelled");
      const call = this.#client.stream(this.#request, this.#timeoutMs);
      call.on("error", () => {}); // the loop below gets it; without this, one that comes after the loop would end the process
      const abort = () => call.cancel();
      this.#signal?.addEventListener("abort", abort, { once: true });
      let broken = true;
      try {
        for await (const response of call) {
          for (const token of this.#take(response as GenerateResponse)) {
            given++;
            yield token;
          }
        }
        broken = false;
        this.#session.length = this.historyTokens;
        return;
      } catch (failed) {
        broken = false;
        const error = errorOf(failed);
        if (this.tokens.length || attempt >= this.#client.retries || !(error instanceof Unavailable)) throw error;
      } finally {
        this.#signal?.removeEventListener("abort", abort);
        if (broken) {
          call.cancel();
          if (given) await this.#session.append(this.tokens.slice(0, given));
        }
      }
      await sleep(FIRST_WAIT_MS * 2 ** attempt);
    }
  }

  /** Iterate over all tokens, and return them. */
  async all(): Promise<number[]> {
    for await (const _ of this);
    return this.tokens;
  }

  #take(response: GenerateResponse): number[] {
    if (response.event === "tokens") {
      const found = response.tokens!.tokenIds;
      this.tokens.push(...found);
      return found;
    }
    if (response.event === "truncated") this.droppedTokens = response.truncated!.droppedTokens;
    if (response.event === "finished") {
      const { reason, historyTokens, prefillTokens } = response.finished!;
      const reasons: Record<string, FinishReason> = { FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length" };
      this.finishReason = reasons[reason] ?? "cancelled";
      this.historyTokens = historyTokens;
      this.prefillTokens = prefillTokens;
    }
    return [];
  }
}
