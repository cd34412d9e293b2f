import { go } from "../lib/route";
import { draft, makeConversation } from "./library";

/** Open a new conversation with `model`. */
export function startChat(model: string): void {
  draft.set(makeConversation({ model }));
  go("chat");
}
