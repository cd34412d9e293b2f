import type { ElementContent, Parents, Root, Text } from "hast";

/** Numbers of passages in an answer: [2], or [1, 3]. */
const CITATION = /\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\]/;

/** Makes elements of the numbers in brackets in an answer's text, but not in code and links. */
export function markCitations() {
  return (root: Root) => {
    const places: Parents[] = [root];
    for (let place = places.pop(); place; place = places.pop()) {
      const children = place.children as ElementContent[];
      if (children.some((child) => child.type === "text" && CITATION.test(child.value)))
        place.children = children.flatMap((child) => (child.type === "text" ? cut(child) : child));
      for (const child of place.children)
        if (child.type === "element" && child.tagName !== "code" && child.tagName !== "a") places.push(child);
    }
  };
}

function cut({ value }: Text): ElementContent[] {
  // Every other part is what the brackets hold.
  return value.split(CITATION).flatMap((part, index): ElementContent[] => {
    if (index % 2 === 0) return part ? [{ type: "text", value: part }] : [];
    return [{ type: "element", tagName: "cite", properties: { numbers: part }, children: [] }];
  });
}
