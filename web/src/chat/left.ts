import type { AssistantMessage } from "./types";

const PREFIX = "mlxr.left.";

/** Keep an answer that grows while its page goes away: the database is too slow then. Without its tokens it fits. */
export function leave(message: AssistantMessage): void {
  const { tokens: _, ...rest } = message;
  try {
    sessionStorage.setItem(PREFIX + message.id, JSON.stringify(rest));
  } catch {
    // Storage is full or forbidden: what the database has must do.
  }
}

/** The answers that were left growing by the page before this one, each told once. */
export function takeLeft(): AssistantMessage[] {
  const found: AssistantMessage[] = [];
  try {
    for (const key of Object.keys(sessionStorage).filter((name) => name.startsWith(PREFIX))) {
      found.push(JSON.parse(sessionStorage.getItem(key) ?? "") as AssistantMessage);
      sessionStorage.removeItem(key);
    }
  } catch {
    // Nothing can be read.
  }
  return found;
}
