import { createStore } from "../lib/store";

const NAME = "mlxr.key";

/** The API key in use; "" without one. Kept for this tab, or for good when the person chose that. */
export const apiKey = createStore(read());

/** Why a key is asked for: requests had none or a wrong one, or the person offers one. */
export const keyWanted = createStore<"no" | "missing" | "wrong" | "offered">("no");

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
