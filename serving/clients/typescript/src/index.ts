/** Client of a kvjax server: sessions that keep their cache, over gRPC. */

export { Client, Generation, Session } from "./client.js";
export type { ClientOptions, FinishReason, GenerateOptions, SessionInfo } from "./client.js";
export * from "./errors.js";
export { fromOpenAIMessages, tokensForChat } from "./templates.js";
export type { ChatTokenizer, Message } from "./templates.js";
export type { Sampling } from "./wire.js";
