import { describe, expect, it } from "vitest";
import { listWords, scoreWords } from "./words";

describe("words", () => {
  it("are compared without case, accents and marks", () => {
    expect(listWords("Crème, BRÛLÉE: 3×4!")).toEqual(["creme", "brulee", "3", "4"]);
    expect(listWords("os.path.join")).toEqual(["os", "path", "join"]);
  });

  it("are pairs of letters where a script has no spaces", () => {
    expect(listWords("東京都")).toEqual(["東京", "京都"]);
    expect(listWords("猫")).toEqual(["猫"]);
  });
});

describe("a score by words", () => {
  it("is higher for a rare word than for one that all texts have, and for a short text", () => {
    const scores = scoreWords(["the cat sat", "the dog sat", "the dog sat on the mat and slept"], "the dog");
    expect(scores[1]).toBeGreaterThan(scores[2] ?? 0);
    expect(scores[2]).toBeGreaterThan(scores[0] ?? 0);
    expect(scores[0]).toBeGreaterThan(0);
  });

  it("grows with the count of a word, ever less", () => {
    const [one = 0, two = 0, many = 0] = scoreWords(["a b b b", "a a b b", "a a a a", "b b b b"], "a");
    expect(two).toBeGreaterThan(one);
    expect(many).toBeGreaterThan(two);
    expect(many - two).toBeLessThan(2 * (two - one));
  });

  it("is 0 where no word is shared", () => {
    expect([...scoreWords(["one", "two"], "three")]).toEqual([0, 0]);
    expect([...scoreWords(["one"], "?!")]).toEqual([0]);
    expect([...scoreWords([], "one")]).toEqual([]);
    expect([...scoreWords(["", "one"], "one")].map((score) => score > 0)).toEqual([false, true]);
  });
});
