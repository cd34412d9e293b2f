import { expect, it } from "vitest";
import { readTitle } from "./titles";

it("a title is read from what models put around it", () => {
  expect(readTitle('"Merging Sorted Lists"')).toBe("Merging Sorted Lists");
  expect(readTitle("**Title:** Sortierte Listen.\n\nI chose it because")).toBe("Sortierte Listen");
  expect(readTitle("# «Listes triées»")).toBe("Listes triées");
  expect(readTitle("What's new in C++?")).toBe("What's new in C++?");
  expect(readTitle("\n \n")).toBeNull();
  expect(readTitle(`Sure! ${"Here is a very long sentence about it. ".repeat(3)}`)).toBeNull();
});
