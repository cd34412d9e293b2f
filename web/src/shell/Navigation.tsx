import { Boxes, Columns2, Cpu, MessageSquare, Settings } from "lucide-react";
import { routeHref, VIEWS, type View } from "../lib/route";
import styles from "./Navigation.module.css";

export const NAMES: Record<View, string> = {
  chat: "Chat",
  compare: "Compare",
  models: "Models",
  engine: "Engine",
  settings: "Settings",
};

const ICONS: Record<View, typeof Cpu> = {
  chat: MessageSquare,
  compare: Columns2,
  models: Boxes,
  engine: Cpu,
  settings: Settings,
};

/** The views: a rail on wide screens, a bar at the lower edge on a phone. */
export function Navigation({ current }: { current: View }) {
  return (
    <nav className={styles.rail} aria-label="Views">
      <span className={styles.brand}>
        <img src="./icon.svg" alt="" width="26" height="26" />
        <span className="hidden-text">mlxr</span>
      </span>
      <ul>
        {VIEWS.map((view) => {
          const Icon = ICONS[view];
          return (
            <li key={view} className={view === "settings" ? styles.last : undefined}>
              <a href={routeHref(view)} aria-current={view === current ? "page" : undefined}>
                <Icon aria-hidden="true" />
                <span>{NAMES[view]}</span>
              </a>
            </li>
          );
        })}
      </ul>
    </nav>
  );
}
