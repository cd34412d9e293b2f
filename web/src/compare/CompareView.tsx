import { Tabs } from "radix-ui";
import { go } from "../lib/route";
import styles from "./CompareView.module.css";
import { SideBySide } from "./SideBySide";
import { SixteenTimes } from "./SixteenTimes";

const PARTS = { "": "Side by side", sixteen: "16 times at once" } as const;

/** One prompt to two models or settings; and the same question 16 times at once. */
export default function CompareView({ detail }: { detail: string }) {
  return (
    <div className={styles.view}>
      <h1>Compare</h1>
      <Tabs.Root value={detail === "sixteen" ? "sixteen" : ""} onValueChange={(part) => go("compare", part)}>
        <Tabs.List className={styles.tabs ?? ""} aria-label="What to compare">
          {Object.entries(PARTS).map(([part, label]) => (
            <Tabs.Trigger key={part} value={part} className={styles.tab ?? ""}>
              {label}
            </Tabs.Trigger>
          ))}
        </Tabs.List>
        <Tabs.Content value="" className={styles.part ?? ""}>
          <SideBySide />
        </Tabs.Content>
        <Tabs.Content value="sixteen" className={styles.part ?? ""}>
          <SixteenTimes />
        </Tabs.Content>
      </Tabs.Root>
    </div>
  );
}
