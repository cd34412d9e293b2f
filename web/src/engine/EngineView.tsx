import { Empty } from "../ui/Notice";

export default function EngineView(_: { detail: string }) {
  return <Empty title="Engine" />;
}
