import { Popover } from "radix-ui";
import { createContext, useContext } from "react";
import styles from "./Citation.module.css";
import { usePortalHost } from "./portal";

/** A text that an answer may name by its number, from 1. */
export interface Cited {
  name: string;
  text: string;
}

/** What the answer that is drawn may name. */
export const CitedTexts = createContext<readonly Cited[]>([]);

/** The numbers of texts in an answer, such as "1, 3", each of which opens its text; where one names none, only numbers. */
export function Citations({ numbers }: { numbers: string }) {
  const texts = useContext(CitedTexts);
  const chosen = [...new Set(numbers.split(",").map(Number))];
  const cited = chosen.flatMap((number) => texts[number - 1] ?? []);
  if (cited.length < chosen.length) return `[${numbers}]`;
  return cited.map((one, index) => <Citation key={chosen[index]} number={chosen[index] ?? 0} cited={one} />);
}

function Citation({ number, cited }: { number: number; cited: Cited }) {
  const host = usePortalHost();
  return (
    <Popover.Root>
      <Popover.Trigger className={styles.number} aria-label={`Passage ${number}: ${cited.name}`}>
        [{number}]
      </Popover.Trigger>
      <Popover.Portal container={host}>
        <Popover.Content className={styles.text} aria-label={cited.name} sideOffset={4} collisionPadding={8}>
          <p className={styles.name}>{cited.name}</p>
          <p dir="auto">{cited.text}</p>
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}
