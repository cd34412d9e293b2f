import { createStore } from "../lib/store";

const NAME = "mlxr.key";

/** The API key in use; "" without one. Kept for this tab, or for good when the person chose that. */
export const apiKey = createStore(read());

/** Why a key is asked for: requests had none or a wrong one, or the person offers one. */
export const keyWanted = createStore<"no" | "missing" | "wrong" | "offered">("no");

/** The key, "" for none, with which the person closed the dialog; null as long as that has not happened. */
let declined: string | null = null;

/** Ask for a key, as a request with `used` was refused. What the page only `reads` asks no more once the person declined. */
export function wantKey(used: string, reads: boolean): void {
  if (used !== apiKey.get()) return; // a refusal that comes late says nothing of a key that was entered since
  if (!reads || used !== declined) keyWanted.set(used ? "wrong" : "missing");
}

/** Close the dialog without a key. */
export function declineKey(): void {
  declined = apiKey.get();
  keyWanted.set("no");
}

export function saveKey(key: string, forGood: boolean): void {
  forgetKey();
  try {
    (forGood ? localStorage : sessionStorage).setItem(NAME, key);
  } catch {
    // Storage is forbidden: the key lasts until the page is loaded again.
  }
  apiKey.set(key);
  keyWanted.set("no");
}

export function forgetKey(): void {
  try {
    sessionStorage.removeItem(NAME);
    localStorage.removeItem(NAME);
  } catch {
    // Nothing was stored.
  }
  apiKey.set("");
}

function read(): string {
  try {
    return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}
