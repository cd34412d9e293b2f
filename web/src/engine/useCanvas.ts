import { type RefObject, useEffect, useRef, useState } from "react";

/** A canvas as wide as its place, sharp on every screen; `draw` runs when it, the width or the theme changes. */
export function useCanvas(
  height: number,
  draw: (context: CanvasRenderingContext2D, width: number) => void,
): RefObject<HTMLCanvasElement | null> {
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(canvas);
  const theme = useThemeName();
  // biome-ignore lint/correctness/useExhaustiveDependencies: the colours are read anew when the theme changes.
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || width === 0) return;
    const scale = window.devicePixelRatio || 1;
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
    element.style.height = `${height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width);
  }, [draw, width, height, theme]);
  return canvas;
}

/** The width of an element in CSS pixels, followed as it changes. */
export function useWidth(element: RefObject<HTMLElement | null>): number {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watched = element.current;
    if (!watched) return;
    const observer = new ResizeObserver(([entry]) => entry && setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(watched);
    return () => observer.disconnect();
  }, [element]);
  return width;
}

/** The theme on the document, so that what is drawn in its colours is drawn again. */
export function useThemeName(): string {
  const [name, setName] = useState(document.documentElement.dataset.theme ?? "");
  useEffect(() => {
    const observer = new MutationObserver(() => setName(document.documentElement.dataset.theme ?? ""));
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => observer.disconnect();
  }, []);
  return name;
}
