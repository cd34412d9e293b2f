import { savedStore } from "./saved";

export type Theme = "system" | "light" | "dark";

/** The theme the person chose; "system" follows the operating system. */
export const theme = savedStore<Theme>(
  "theme",
  "system",
  (value): value is Theme => value === "system" || value === "light" || value === "dark",
);

export type TextSize = "normal" | "large" | "larger";

/** How large letters are. */
export const textSize = savedStore<TextSize>(
  "size",
  "normal",
  (value): value is TextSize => value === "normal" || value === "large" || value === "larger",
);

/** Put the chosen theme and size of letters on the document, now and whenever the choice or the system's preference changes. */
export function followTheme(): void {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = theme.get();
    document.documentElement.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  };
  const applySize = () => {
    document.documentElement.dataset.size = textSize.get();
  };
  apply();
  applySize();
  textSize.subscribe(applySize);
  theme.subscribe(apply);
  dark.addEventListener("change", apply);
}
