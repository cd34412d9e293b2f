import { CircleQuestionMark } from "lucide-react";
import { Popover } from "radix-ui";
import type { ReactNode } from "react";
import { Button } from "./Button";
import styles from "./Help.module.css";
import { usePortalHost } from "./portal";

/** A small mark beside a term that opens what it means. */
export function Help({ about, children }: { about: string; children: ReactNode }) {
  const host = usePortalHost();
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button kind="quiet" small className={styles.mark ?? ""} aria-label={`About ${about}`}>
          <CircleQuestionMark aria-hidden="true" />
        </Button>
      </Popover.Trigger>
      <Popover.Portal container={host}>
        <Popover.Content className={styles.text ?? ""} aria-label={about} sideOffset={4} collisionPadding={8}>
          {children}
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}
