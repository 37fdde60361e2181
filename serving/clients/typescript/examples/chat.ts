/** A chat in a terminal: npm run chat -- [ADDRESS] [TOKENIZER FOLDER] [STOP TEXT]. Each line goes to the session as it is. */

import { createInterface } from "node:readline";

import { Client } from "../src/index.js";
import { loadTokenizer } from "../src/tokenizer.js";
import { tell } from "./told.js";

const [address = "127.0.0.1:50051", folder = "../../../models/needle", stop = "."] = process.argv.slice(2);
const tokenizer = loadTokenizer(folder);
const client = new Client(address);
try {
  const session = await client.createSession();
  const lines = createInterface({ input: process.stdin, output: process.stdin.isTTY ? process.stdout : undefined });
  lines.prompt();
  for await (const line of lines) {
    if (!line) {
      lines.prompt();
      continue;
    }
    await session.append(tokenizer.encode(line));
    const tokens = session.generate({ maxNewTokens: 64, stopTokenIds: tokenizer.encode(stop).slice(0, 1) });
    let told = "";
    for await (const _ of tokens) {
      const text = tokenizer.decode(tokens.tokens);
      if (text.endsWith("\ufffd")) continue; // inside a character
      process.stdout.write(text.slice(told.length));
      told = text;
    }
    console.log();
    lines.prompt();
  }
  if (process.stdin.isTTY) console.log(); // so that the shell's prompt has a line of its own
  await session.close();
} catch (error) {
  tell("chat", error, address);
} finally {
  client.close();
}
