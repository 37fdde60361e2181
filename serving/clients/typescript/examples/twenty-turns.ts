/**
 * Twenty turns on one session: npm run twenty-turns -- [ADDRESS] [TOKENIZER FOLDER].
 *
 * Each turn tells the model a pass key, and asks for it. A turn prefills only what is new: its own line, and the answer before it.
 * The embedded model answers about five of the twenty wrongly.
 */

import { Client } from "../src/index.js";
import { loadTokenizer } from "../src/tokenizer.js";
import { tell } from "./told.js";

const [address = "127.0.0.1:50051", folder = "../../../models/needle"] = process.argv.slice(2);
const tokenizer = loadTokenizer(folder);
const stop = tokenizer.encode(".").slice(0, 1);
const rivers = [
  ...["golden", "silver", "quiet", "frozen", "hidden", "broken", "distant", "bright", "narrow", "gentle"],
  ...["ancient", "hollow", "crimson", "velvet", "wooden", "marble", "copper", "silent", "stormy", "amber"],
];
const client = new Client(address);
try {
  const session = await client.createSession();
  for (const [turn, river] of rivers.entries()) {
    const code = 10007 + 4111 * turn;
    await session.append(tokenizer.encode(`The pass key for ${river} river is ${code}.\nAnswer: The pass key for ${river} river is`));
    const generation = session.generate({ maxNewTokens: 8, stopTokenIds: stop });
    const answer = tokenizer.decode(await generation.all()).trim();
    console.log(`turn ${turn + 1}: ${answer} (${generation.prefillTokens} of ${generation.historyTokens} tokens prefilled)`);
  }
  await session.close();
} catch (error) {
  tell("twenty-turns", error, address);
} finally {
  client.close();
}
