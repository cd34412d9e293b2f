import { Tooltip } from "radix-ui";
import type { ReactElement } from "react";
import { usePortalHost } from "./portal";
import styles from "./Tip.module.css";

/** A short text beside an element while it is hovered or has the focus. The element needs a label of its own. */
export function Tip({ text, children }: { text: string; children: ReactElement }) {
  return (
    <Tooltip.Root>
      <Tooltip.Trigger asChild>{children}</Tooltip.Trigger>
      <Tooltip.Portal container={usePortalHost()}>
        <Tooltip.Content className={styles.tip ?? ""} sideOffset={6} collisionPadding={8}>
          {text}
        </Tooltip.Content>
      </Tooltip.Portal>
    </Tooltip.Root>
  );
}
