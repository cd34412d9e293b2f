import { describe, expect, it } from "vitest";
import { countChanges, findParts, type Part } from "./diff";

function write(parts: readonly Part[]): string {
  return parts
    .map(({ kind, text }) => (kind === "same" ? text : kind === "gone" ? `[-${text}-]` : `[+${text}+]`))
    .join("");
}

function join(parts: readonly Part[], left: Part["kind"]): string {
  return parts.flatMap(({ kind, text }) => (kind === left ? [] : [text])).join("");
}

describe("what differs between two texts", () => {
  it("is told by words, with the blanks between them", () => {
    expect(write(findParts("a red car", "a red car"))).toBe("a red car");
    expect(write(findParts("a red car", "a blue car"))).toBe("a [-red-][+blue+] car");
    expect(write(findParts("one two three", "four five three"))).toBe("[-one two-][+four five+] three");
    expect(write(findParts("It joins paths.", "It joins two paths, too."))).toBe("It joins [+two +]paths[+, too+].");
    expect(write(findParts("", "new"))).toBe("[+new+]");
    expect(findParts("", "")).toEqual([]);
  });

  it("counts the words that changed", () => {
    expect(countChanges(findParts("a red car.", "a blue truck!"))).toBe(2);
    expect(countChanges(findParts("same", "same"))).toBe(0);
  });

  it("leads from every text to every other", () => {
    let seed = 7;
    const draw = (most: number) => {
      seed = (seed * 48271) % 2147483647;
      return seed % most;
    };
    for (let round = 0; round < 200; round++) {
      const make = () => Array.from({ length: draw(30) }, () => ["a", "b", " ", "c", ", ", "\n"][draw(6)]).join("");
      const [from, to] = [make(), make()];
      const parts = findParts(from, to);
      expect([join(parts, "new"), join(parts, "gone")]).toEqual([from, to]);
    }
  });

  it("of long texts that share nothing ends soon", () => {
    const [from, to] = ["x ".repeat(20_000), "y ".repeat(20_000)];
    const parts = findParts(from, to);
    expect([join(parts, "new"), join(parts, "gone")]).toEqual([from, to]);
  });
});
