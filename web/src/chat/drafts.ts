const PREFIX = "mlxr.draft.";

/** What the person had typed for a conversation before the page was left; "" for nothing. */
export function readDraft(conversation: string): string {
  try {
    return sessionStorage.getItem(PREFIX + conversation) ?? "";
  } catch {
    return "";
  }
}

export function keepDraft(conversation: string, text: string): void {
  try {
    if (text) sessionStorage.setItem(PREFIX + conversation, text);
    else sessionStorage.removeItem(PREFIX + conversation);
  } catch {
    // Storage is full or forbidden: the draft lasts as long as the view.
  }
}
