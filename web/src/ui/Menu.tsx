import { Ellipsis } from "lucide-react";
import { DropdownMenu } from "radix-ui";
import type { ReactNode } from "react";
import { Button } from "./Button";
import styles from "./Menu.module.css";
import { usePortalHost } from "./portal";

interface Props {
  label: string;
  small?: boolean;
  icon?: ReactNode;
  children: ReactNode;
}

/** A button, "…" unless it has another icon, that opens a list of actions. */
export function Menu({ label, small = true, icon = <Ellipsis />, children }: Props) {
  return (
    <DropdownMenu.Root modal={false}>
      <DropdownMenu.Trigger asChild>
        <Button kind="quiet" small={small} aria-label={label} title={label}>
          {icon}
        </Button>
      </DropdownMenu.Trigger>
      <DropdownMenu.Portal container={usePortalHost()}>
        <DropdownMenu.Content className={styles.menu ?? ""} align="end" sideOffset={4} collisionPadding={8}>
          {children}
        </DropdownMenu.Content>
      </DropdownMenu.Portal>
    </DropdownMenu.Root>
  );
}

export function MenuItem({
  onSelect,
  danger = false,
  disabled = false,
  children,
}: {
  onSelect: () => void;
  danger?: boolean;
  disabled?: boolean;
  children: ReactNode;
}) {
  return (
    <DropdownMenu.Item
      className={`${styles.item} ${danger ? styles.danger : ""}`}
      disabled={disabled}
      onSelect={onSelect}
    >
      {children}
    </DropdownMenu.Item>
  );
}
