/** A new identifier of 22 letters and digits. `crypto.randomUUID` exists on secure pages only; this works on all. */
export function makeId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(22));
  return Array.from(bytes, (byte) => ALPHABET[byte % ALPHABET.length]).join("");
}

const ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz";
