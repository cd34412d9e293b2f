import { describe, expect, it } from "vitest";
import { readKey } from "./commands";

const press = (options: KeyboardEventInit, target: Element = document.body) => {
  if (target !== document.body) document.body.append(target);
  let found: ReturnType<typeof readKey> = null;
  target.addEventListener("keydown", (event) => {
    found = readKey(event as KeyboardEvent);
  });
  target.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, ...options }));
  return found;
};

describe("keys", () => {
  it("give commands, with Ctrl or the Mac's command key", () => {
    expect(press({ key: "k", ctrlKey: true })).toBe("search");
    expect(press({ key: "k", metaKey: true })).toBe("search");
    expect(press({ key: "O", code: "KeyO", ctrlKey: true, shiftKey: true })).toBe("newChat");
    expect(press({ key: "®", code: "KeyR", altKey: true })).toBe("regenerate");
    expect(press({ key: "?" })).toBe("help");
    expect(press({ key: "x" })).toBeNull();
  });

  it("that write text do so in fields, and windows have the keyboard for themselves", () => {
    const input = document.createElement("input");
    expect(press({ key: "/" }, input)).toBeNull();
    expect(press({ key: "k", ctrlKey: true }, input)).toBe("search");
    const dialog = document.createElement("dialog");
    expect(press({ key: "k", ctrlKey: true }, dialog)).toBeNull();
  });
});
