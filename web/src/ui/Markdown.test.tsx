import { cleanup, fireEvent, render as renderAlone, waitFor } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ReactElement } from "react";
import { afterEach, expect, it } from "vitest";
import { CitedTexts } from "./Citation";
import { Markdown } from "./Markdown";

const render = (element: ReactElement) => renderAlone(element, { wrapper: Tooltip.Provider });

afterEach(cleanup);

it("draws headings, tables, lists, code with its language", () => {
  const { container } = render(<Markdown text={"# A\n\n| x |\n|---|\n| 1 |\n\n- [x] done\n\n```py\nx = 1\n```"} />);
  expect(container.querySelector("h3")?.textContent).toBe("A");
  expect(container.querySelector("td")?.textContent).toBe("1");
  expect(container.querySelector("input")?.checked).toBe(true);
  expect(container.querySelector("figcaption")?.textContent).toContain("py");
  expect(container.querySelector("pre")?.textContent).toBe("x = 1");
});

it("renders no HTML, drops other addresses and fetches no image", () => {
  const hostile = [
    "<script>window.hit = 1</script>",
    '<img src="http://evil.example/p.png" onerror="hit()">',
    "text <b onclick=hit()>bold</b>",
    "[click](javascript:hit())",
    "[data](data:text/html,<script>1</script>)",
    "[vb]( vbscript:x) <javascript:hit()>",
    "![alt](http://evil.example/i.png)",
    "![alt](javascript:hit())",
    "[ok](https://good.example)",
    "[mail](mailto:a@b.example)",
    "$\\href{javascript:hit()}{x}$",
    "<iframe src=http://evil.example></iframe>",
  ].join("\n\n");
  const { container } = render(<Markdown text={hostile} />);
  expect(container.querySelectorAll("script, img, iframe, b, object, style, link")).toHaveLength(0);
  const addresses = [...container.querySelectorAll("a")].map((link) => link.getAttribute("href"));
  expect(addresses).toEqual(["http://evil.example/i.png", "https://good.example", "mailto:a@b.example"]);
  for (const link of container.querySelectorAll("a")) {
    expect(link.rel).toContain("noopener");
    expect(link.target).toBe("_blank");
  }
  expect(container.textContent).toContain("<script>");
});

it("loads what draws maths when there is some", async () => {
  const { container } = render(<Markdown text={"So \\(x^2\\) and\n\n$$\ny\n$$\n\nfor $5."} />);
  await waitFor(() => expect(container.querySelectorAll("math")).toHaveLength(2), { timeout: 5000 });
  expect(container.querySelector('math[display="block"]')).not.toBeNull();
  expect(container.textContent).toContain("for $5.");
  expect(container.querySelector("[style]")).toBeNull();
});

it("keeps the elements of finished blocks while the text grows", () => {
  const { container, rerender } = render(<Markdown text={"First.\n\nSec"} growing />);
  const first = container.querySelector("p");
  rerender(<Markdown text={"First.\n\nSecond **bo"} growing />);
  expect(container.querySelector("p")).toBe(first);
  expect(container.querySelector("strong")?.textContent).toBe("bo");
});

it("colours code", async () => {
  const { container } = render(<Markdown text={"```python\ndef f(): pass\n```"} />);
  await waitFor(() => expect(container.querySelector(".hljs-keyword")?.textContent).toBe("def"), { timeout: 5000 });
  expect(container.querySelector("pre")?.textContent).toBe("def f(): pass");
});

it("lets each paragraph begin at its own side, and code always at the left", () => {
  const { container } = render(<Markdown text={"سلام\n\n- a\n\n```\nx\n```"} />);
  expect([...container.querySelectorAll("[dir]")].map((one) => [one.tagName, one.getAttribute("dir")])).toEqual([
    ["P", "auto"],
    ["UL", "auto"],
    ["FIGURE", "ltr"],
  ]);
});

it("folds long code until all of it is asked for", () => {
  const code = Array.from({ length: 300 }, (_, line) => `line ${line}`).join("\n");
  const { container, getByText } = render(<Markdown text={`\`\`\`\n${code}\n\`\`\``} />);
  expect(container.querySelector("pre")?.textContent).toContain("line 39");
  expect(container.querySelector("pre")?.textContent).not.toContain("line 40");
  fireEvent.click(getByText("Show all 300 lines"));
  expect(container.querySelector("pre")?.textContent).toBe(code);
});

it("draws details, and no more of them than a few in each other", () => {
  const deep = 2000;
  const text = `${"<details>\n".repeat(deep)}- in\n${"</details>\n".repeat(deep)}`;
  const { container } = render(<Markdown text={text} />);
  expect(container.querySelectorAll("details").length).toBeLessThan(10);
  expect(render(<Markdown text={"<details>\n<summary>S</summary>\n\n- in\n</details>"} />).getByText("S")).toBeTruthy();
});

it("opens the texts that an answer names by their numbers, as text", () => {
  const cited = [{ name: "a.md:1", text: "<b>First</b>" }];
  const text = "So [1], not [2] or [1, 2].\n\n- `x[1]` and [1](https://good.example)";
  const { container, getByLabelText, queryByText } = render(
    <CitedTexts value={cited}>
      <Markdown text={text} />
    </CitedTexts>,
  );
  expect(container.textContent).toBe("So [1], not [2] or [1, 2].\n\nx[1] and 1\n".replaceAll("\n\n", "\n"));
  expect(container.querySelectorAll("button")).toHaveLength(1);
  fireEvent.click(getByLabelText("Passage 1: a.md:1"));
  expect(queryByText("<b>First</b>")).toBeTruthy();
  expect(render(<Markdown text="So [1]." />).container.textContent).toBe("So [1].");
});
