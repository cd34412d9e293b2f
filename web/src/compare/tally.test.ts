import { expect, it } from "vitest";
import { addVote, nameOptions, tallies } from "./tally";

it("counts who was best, and how often each was compared", () => {
  addVote(["a", "b"], 1);
  addVote(["a", "b", "c"], null);
  addVote(["a", "a"], 0);
  expect(tallies.get()).toEqual([
    { name: "b", best: 1, compared: 2 },
    { name: "a", best: 1, compared: 3 },
    { name: "c", best: 0, compared: 1 },
  ]);
});

it("names a model with its temperature", () => {
  const options = { model: "", temperature: null, seed: 1, maxTokens: 5 };
  expect(nameOptions(options, "coder")).toBe("coder, temperature default");
  expect(nameOptions({ ...options, model: "m", temperature: 0 }, "")).toBe("m, temperature 0");
});
