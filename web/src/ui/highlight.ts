import type { Root, RootContent } from "hast";
import { createElement, type ReactNode } from "react";

type Highlighter = (code: string, language: string) => ReactNode[] | null;

let loading: Promise<Highlighter> | null = null;

/** The highlighter; its code is loaded when the first block of code is shown. */
export function loadHighlighter(): Promise<Highlighter> {
  loading ??= import("lowlight").then(({ common, createLowlight }) => {
    const lowlight = createLowlight(common);
    return (code, language) => (lowlight.registered(language) ? toNodes(lowlight.highlight(language, code)) : null);
  });
  return loading;
}

function toNodes(root: Root): ReactNode[] {
  return root.children.map(toNode);
}

function toNode(node: RootContent, key: number): ReactNode {
  if (node.type === "text") return node.value;
  if (node.type !== "element") return null;
  const className = Array.isArray(node.properties.className) ? node.properties.className.join(" ") : undefined;
  return createElement(
    "span",
    { key, className },
    node.children.map((child, index) => toNode(child as RootContent, index)),
  );
}
